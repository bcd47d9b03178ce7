"""A model in this process: load it, ask it, record what it routes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from moeinf.api.answers import Answer, AsyncStream, Stream
from moeinf.offload.policy.names import DEFAULT_POLICY, POLICY_NAMES
from moeinf.runtime.config import EngineConfig, Kv, Settings, Wanted, read_environment
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.info import EngineInfo
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.generation.generate import Generation
from moeinf.runtime.generation.report import statistics
from moeinf.runtime.generation.seq2seq import Languages, converse
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.jobs.datasets.items import Item
from moeinf.runtime.jobs.ensure import ensure
from moeinf.runtime.jobs.trace_dataset import Traced, trace_items
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.requests import Form, Limits, Message, SamplingOptions
from moeinf.runtime.sizes import Progress, parse_memory_or_auto
from moeinf.runtime.text.reasoning import Kind

_LOG = logging.getLogger("moeinf")
ChatMessage = Message | Mapping[str, str]  # a message, or {"role": …, "content": …}


class Model:
    """A model that is loaded into this process. Close it, or use it in a with statement.

        with Model("demo", memory="30%") as model:
            text = model.generate("17+25=").text

    One answer is computed at a time: calls from several threads and tasks wait for each other.
    Errors are those of `moeinf.errors`; their `hint` says what helps.
    """

    def __init__(
        self,
        name: str,
        *,
        memory: str | int | None = None,
        context: int | None = None,
        device: Wanted = "auto",
        policy: str = DEFAULT_POLICY,
        threads: int | None = None,
        kv: Kv | None = None,
        draft: str | None = None,
        reproducible: bool = False,
        trace: bool = True,
        languages: tuple[str, str] | None = None,
        home: str | Path | None = None,
    ) -> None:
        """Load a model as `moeinf run` does; one that is absent is pulled first.

        memory     RAM for experts: "6GiB", bytes, a share of all experts ("30%"), or "auto"
        context    tokens of a conversation
        languages  the source's and the target's, for a translation model: ("eng_Latn", "fra_Latn")
        trace      add what requests route to the model's EAMC
        home       the folder with models; default: MOEINF_HOME

        The other options are those of docs/cli.md. Notes go to the logger "moeinf". Raises
        InvalidValue, NoSuchModel and what pulling raises, DoesNotFit, DamagedModel.
        """
        if policy not in POLICY_NAMES:
            raise InvalidValue(f"{policy!r} is not a policy (expected {', '.join(POLICY_NAMES)})")
        settings = read_environment()
        if home is not None:
            settings = replace(settings, home=Path(home).expanduser().absolute(), more_homes=())
        config = EngineConfig(
            memory=settings.memory if memory is None else parse_memory_or_auto(str(memory)),
            context=context,
            policy=policy,
            threads=threads,
            trace=trace,
            device=device,
            kv=kv or settings.kv,
            libcuda=settings.libcuda,
            reproducible=reproducible,
            draft=draft,
        )
        manifest, folder = ensure(name, settings, _LOG.info, _silent)
        engine = Engine.open(manifest, folder, config, settings)
        self._take(engine, Languages(*(languages or ())))
        for note in self.engine.take_notes():
            _LOG.info(note)

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        folder: Path,
        config: EngineConfig,
        settings: Settings,
        languages: Languages | None = None,
        now: str | None = None,
    ) -> Model:
        """Load an installed model with every option. now: the date that templates see.

        Raises as Engine.open, and BadLanguage.
        """
        model = cls.__new__(cls)
        model._take(Engine.open(manifest, folder, config, settings), languages, now)
        return model

    def _take(
        self, engine: Engine, languages: Languages | None = None, now: str | None = None
    ) -> None:
        self.engine, self._languages = engine, languages or Languages()
        self._busy, self._owner = threading.Lock(), 0  # the thread of the answer in progress
        self._executor: ThreadPoolExecutor | None = None  # of the answers to async calls
        self._streams, self._later = WeakSet[Stream](), WeakSet[AsyncStream]()
        self._talk: Conversation | None = None
        try:
            self._talk = converse(engine, now=now, languages=languages)
        except BaseException:
            engine.close()
            raise

    @property
    def conversation(self) -> Conversation:
        """The turns and the KV of the last answer. Raises RuntimeError once it is closed."""
        if self._talk is None:
            raise RuntimeError(f"{self.info.name} is closed")
        return self._talk

    def close(self) -> None:
        """End this thread's answers and those of tasks, wait for others, release the memory."""
        if self._talk is None:
            return
        for later in list(self._later):
            later.stop()
        if self._executor is not None:
            self._executor.shutdown()
        if self._owner == threading.get_ident():
            for stream in list(self._streams):
                with suppress(ValueError):  # another thread waits in it for its turn
                    stream.close()
        with self._alone():
            self._talk = None  # the KV cache goes first
            self.engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        """The facts of the model and of its place in memory."""
        return self.engine.info

    def generate(
        self,
        prompt: str,
        *,
        system: str = "",
        raw: bool = False,
        think: bool | None = None,
        format: Form = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Answer:
        """Answer one prompt, by the model's template unless `raw`.

        think      for models that can think before they answer; None: as the model does by default
        format     "json", or a JSON schema that the answer must match
        stop       texts before which the answer ends
        sampling   temperature, top_k, top_p, min_p, seed and the other SamplingOptions

        Raises PromptTooLong, TemplateError, BadFormat, InvalidValue, and ExpertReadError.
        """
        ways = {"system": system, "raw": raw, "think": think, "format": format}
        return _whole(self.stream(prompt, **ways, max_tokens=max_tokens, stop=stop, **sampling))

    def chat(self, messages: Sequence[ChatMessage], **options: Any) -> Answer:
        """Answer the last of some messages, which is the user's.

        The KV of the messages before is reused. Without room the oldest are left out. options:
        those of `generate` but system and raw. Raises also InvalidValue for other messages.
        """
        return _whole(self.stream(messages, **options))

    def stream(self, prompt: str | Sequence[ChatMessage], **options: Any) -> Stream:
        """Answer a prompt as `generate`, or messages as `chat`; return the text as it comes."""
        stream = Stream(self._run(_question(prompt, options)))
        self._streams.add(stream)
        return stream

    async def async_generate(self, prompt: str, **options: Any) -> Answer:
        """Answer as `generate` does, in another thread."""
        return await _awaited(self.async_stream(prompt, **options))

    async def async_chat(self, messages: Sequence[ChatMessage], **options: Any) -> Answer:
        """Answer as `chat` does, in another thread."""
        return await _awaited(self.async_stream(messages, **options))

    def async_stream(self, prompt: str | Sequence[ChatMessage], **options: Any) -> AsyncStream:
        """Answer as `stream` does, for `async for`."""
        _ = self.conversation  # raises once it is closed: its executor has ended
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "moeinf")
        stop = threading.Event()
        text = Stream(self._run(_question(prompt, options), stop.is_set))
        stream = AsyncStream(text, stop, self._executor)
        self._later.add(stream)
        return stream

    def trace(
        self,
        prompts: Iterable[str | Item],
        *,
        max_tokens: int = 64,
        raw: bool = False,
        seed: int = 0,
        name: str = "prompts",
        out: str | Path | None = None,
        stopped: Callable[[], bool] = lambda: False,
        advance: Callable[[], None] = lambda: None,
    ) -> Traced:
        """Answer prompts to record in the model's EAMC which experts they use.

        out: a recording (*.eam) for `moeinf simulate`. advance: called after each prompt. Raises
        OSError when the recording cannot be written.
        """
        items = [Item(one) if isinstance(one, str) else one for one in prompts]
        with self._alone():
            self.conversation.release()  # a trace has a KV cache of its own
            return trace_items(
                self.engine, items, SamplingOptions(seed=seed), max_tokens, self._languages,
                raw=raw, name=name, out=None if out is None else Path(out), stopped=stopped,
                advance=advance,
            )  # fmt: skip

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other answer is computed. RuntimeError: this thread left one half read."""
        me = threading.get_ident()
        if self._owner == me:
            raise RuntimeError("read the stream before this call to its end, or close it")
        with self._busy:
            self._owner = me
            try:
                yield
            finally:
                self._owner = 0

    def _run(
        self, asked: _Question, stopped: Callable[[], bool] = lambda: False
    ) -> Generator[tuple[Kind, str], None, Answer]:
        with self._alone():
            talk = self.conversation
            generation = asked.put_to(talk, stopped)
            said: dict[Kind, list[str]] = {"answer": [], "thinking": [], "call": []}
            for kind, piece in talk.pieces(generation):
                said[kind].append(piece)
                yield kind, piece
            return Answer(
                "".join(said["answer"]),
                "".join(said["thinking"]),
                generation.finish_reason,
                tuple(generation.tokens),
                generation.prompt_tokens,
                generation.prefilled_tokens,
                talk.dropped,
                statistics(self.engine, generation),
            )


class _Question:
    """A question and its checked options."""

    def __init__(
        self,
        text: str | Sequence[ChatMessage],
        system: str = "",
        raw: bool = False,
        think: bool | None = None,
        format: Form = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        said = [Message("user", text)] if isinstance(text, str) else [_message(m) for m in text]
        if said and said[0].role == "system":
            system = said.pop(0).content
        if raw and not isinstance(text, str):
            raise InvalidValue("raw: messages have a template; give a text")
        if not said or said[-1].role != "user" or any(m.role == "system" for m in said):
            raise InvalidValue("messages: the last must be the user's, and only the first system's")
        if max_tokens is not None and max_tokens < 0:
            raise InvalidValue(f"max_tokens must be at least 0, got {max_tokens}")
        self._earlier, self._text = said[:-1], said[-1].content
        self._system, self._raw, self._think, self._form = system, raw, think, format
        self._limits = Limits(max_tokens, (stop,) if isinstance(stop, str) else tuple(stop))
        self._sampling = SamplingOptions(**(sampling or {}))

    def put_to(self, talk: Conversation, stopped: Callable[[], bool]) -> Generation:
        """Prepare the answer. The conversation keeps nothing of what it was asked before."""
        talk.clear()
        talk.system, talk.think, talk.form = self._system, self._think, self._form
        talk.messages = list(self._earlier)
        ask = talk.complete if self._raw else talk.ask
        return ask(self._text, self._sampling, self._limits, stopped)


_OPTIONS = ("system", "raw", "think", "format", "max_tokens", "stop")
_SAMPLING = tuple(field.name for field in fields(SamplingOptions))


def _question(prompt: str | Sequence[ChatMessage], options: Mapping[str, Any]) -> _Question:
    ways = {name: value for name, value in options.items() if name in _OPTIONS}
    rest = {name: value for name, value in options.items() if name not in _OPTIONS}
    for name in rest:
        if name not in _SAMPLING:
            known = ", ".join((*_OPTIONS, *_SAMPLING))
            raise InvalidValue(f"{name} is not an option (expected {known})")
    return _Question(prompt, **ways, sampling=rest)


def _message(said: ChatMessage) -> Message:
    if isinstance(said, Message):
        return said
    about = said if isinstance(said, Mapping) else {}
    role, content = about.get("role"), about.get("content")
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise InvalidValue("messages: each needs a role (system, user or assistant) and a content")
    return Message(role, content)


def _whole(stream: Stream) -> Answer:
    for _ in stream:
        pass
    return stream.answer


async def _awaited(stream: AsyncStream) -> Answer:
    async for _ in stream:
        pass
    return stream.answer


@contextmanager
def _silent(_what: str) -> Iterator[Progress]:
    yield lambda _phase, _done, _total: None
