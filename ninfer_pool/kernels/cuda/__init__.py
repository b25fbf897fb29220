"""The same operations in Triton, one a file. Only a call with tensors on CUDA imports them."""
