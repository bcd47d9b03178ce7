"""Select the device of kernel tests: a GPU if there is one, else Triton's interpreter.

tests/conftest.py enables the interpreter. `DEVICE` holds the tests' tensors.
"""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
