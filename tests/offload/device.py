"""Where device kernels are tested: on a GPU if there is one, else in Triton's interpreter.

tests/conftest.py asks for the interpreter. `DEVICE` is where the tests' tensors go.
"""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
