"""Where device kernels are tested: on a GPU if there is one, else in Triton's interpreter.

To be imported before anything that imports triton; `DEVICE` is where the tests' tensors go.
"""

import os

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
