"""Compare our engine with llama.cpp on the same files: logits over 200 positions, best tokens.

Run: python scripts/compare_llama_cpp.py [--family NAME] [--demo ITEMS]
Needs llama.cpp's Python package: pip install 'moeinf[llama]'.

For every family a model with random weights is pulled under each tag, exported as GGUF, and run by
both programs. llama.cpp quantises the f32 file to its own types as well; as long as we do not read
those, the figures compare llama.cpp with itself at f32: what a type costs. `--demo` compares
greedy answers to held-out exercises.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import llama_cpp  # pyright: ignore[reportMissingImports]
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.exported import FAMILIES, Model, checkpoint, exported
from tests.generating import answering
from tests.llama_cpp_side import Difference, difference, llama, our_logits
from tests.runtime.gguf.test_against_llama_cpp import items, rendered

TAGS = ("f32", "bf16", "q8", "q4")
TYPES = {  # llama.cpp's own quantisations, by llama_ftype
    "Q4_0": 2,
    "Q8_0": 7,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "MXFP4_MOE": 38,
}
POSITIONS = 200
