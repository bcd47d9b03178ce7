"""Show a spinner until an answer begins, and how much of the prompt is read."""

from __future__ import annotations

from moeinf.cli.chat.backends import Partner, Pieces
from moeinf.cli.output import Output


def awaited(answer: Pieces, partner: Partner, out: Output, shows_thinking: bool) -> Pieces:
    """Yield the pieces of an answer; end the spinner before the first one that is shown."""
    with out.spinner(f"waiting for {partner.model}") as spinner:

        def reading(read: int, count: int) -> None:
            spinner.show(f"reading the prompt {read:,}/{count:,} tokens")

        partner.reading = reading
        for kind, piece in answer:
            if kind == "answer" or shows_thinking:
                spinner.stop()
            else:
                spinner.show("thinking")
            yield kind, piece
