"""Read published checkpoints: headers, tensor bytes, number formats, the tensors a family needs."""
