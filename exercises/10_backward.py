"""The whole backward pass. One idea: the layers' backward functions in reverse order; where the
forward pass adds, the gradients go both ways."""

from llmc.tensors import layer, views  # noqa: F401
from train_gpt2 import (attention_backward, crossentropy_softmax_backward, encoder_backward,  # noqa: F401
                        gelu_backward, layernorm_backward, matmul_backward, scratch_table)


def backward_into(self, grads, micro_steps):
    """Write all of `grads` but wte from token V on, which stays 0."""
    raise NotImplementedError  # about 24 lines
