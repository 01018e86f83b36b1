"""Which page a model belongs to: the magic number of its checkpoint says it, or its Hugging Face folder."""

import importlib
import os

import numpy as np

from llmc.checkpoint import read_model
from llmc.files import EXPORT, MODEL_MAGIC, open_input
from llmc.resume import model_file

PAGES = {MODEL_MAGIC: ("train_gpt2", "GPT2")}  # magic number -> module and class; train_gpt2_cuda has the GPU's class


def architecture_of(path, hint=EXPORT):
    """The class of the page that reads the model file `path`; GPT-2's for a file of another kind, which it refuses."""
    with open_input(path, hint) as f:
        magic = int(np.frombuffer(f.read(4).ljust(4, b"\0"), "<i4")[0])
    module, name = PAGES.get(magic, PAGES[MODEL_MAGIC])
    return getattr(importlib.import_module(module), name)


def on_gpu(architecture):
    """The class of the page for GPUs."""
    return getattr(importlib.import_module(f"{architecture.__module__}_cuda"), architecture.__name__)


def load_model(path):
    """Load (architecture, config, params) from a run's directory, a .bin file or a Hugging Face folder."""
    if os.path.exists(os.path.join(path, "config.json")):
        from export_weights import read_hf_folder  # here: it needs PyTorch

        return read_hf_folder(path)
    path = model_file(path)
    architecture = architecture_of(path)
    return architecture, *read_model(path, architecture)
