"""Test the pip lines of the README and of docs/gpu.md, and how their packages are judged."""

from __future__ import annotations

import pytest

from moeinf.runtime.machine.diagnosis import CPU_INDEX
from scripts.check_torch import ROOT, cpu_line, cuda_line, cuda_of, fault, packages

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_command_takes_torch_for_the_cpu() -> None:
    words = cpu_line()
    assert words[:2] == ["pip", "install"]
    assert words[words.index("--extra-index-url") + 1] == CPU_INDEX
    assert words[words.index("-c") + 1] == "constraints.txt"
    assert words[-1] == "."


def test_the_line_for_cuda_is_linked_and_names_no_index() -> None:
    assert cuda_line() == ["pip", "install", "-c", "constraints.txt", "."]
    behind = README[README.index("```sh\npip install") :].split("\n\n")[1]  # the first block
    assert "](docs/gpu.md#what-it-needs)" in behind


CPU = {"moeinf": "0.2.0", "torch": "2.13.0+cpu", "nvidia-ml-py": "13.615.71"}
CUDA = {**CPU, "torch": "2.13.0", "nvidia-cuda-runtime": "13.0.96", "triton": "3.7.1"}


@pytest.mark.parametrize(
    ("found", "cuda", "wrong"),
    [
        (CPU, False, ""),
        (CUDA, True, ""),
        (CUDA, False, "torch 2.13.0 with nvidia-cuda-runtime, triton"),
        (CPU, True, "torch 2.13.0+cpu without CUDA"),
        ({**CUDA, "torch": "2.13.0+cpu"}, True, "torch 2.13.0+cpu without CUDA"),
        ({"moeinf": "0.2.0"}, False, "no torch"),
    ],
)
def test_what_pip_would_install(found: dict[str, str], cuda: bool, wrong: str) -> None:
    assert fault(found, cuda) == wrong


def test_a_report_of_pip() -> None:
    about = [{"metadata": {"name": "NVIDIA_cublas", "version": "13.1"}, "is_direct": False}]
    found = packages({"version": "1", "install": about})
    assert found == {"nvidia-cublas": "13.1"}
    assert cuda_of(found) == ["nvidia-cublas"]
