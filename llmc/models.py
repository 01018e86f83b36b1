"""Which page a model belongs to: the magic number of its checkpoint says it, or its Hugging Face folder."""

import importlib
import os

from llmc.checkpoint import read_model
from llmc.files import MODEL_MAGIC, export_hint, open_input
from llmc.resume import model_file

PAGES = {MODEL_MAGIC: ("train_gpt2", "GPT2")}  # magic number -> module and class; train_gpt2_cuda has the GPU's class


def on_gpu(architecture):
    """The class of the page for GPUs."""
    return getattr(importlib.import_module(f"{architecture.__module__}_cuda"), architecture.__name__)


def load_model(path):
    """Load (architecture, config, params) from a run's directory, a .bin file or a Hugging Face folder."""
    if os.path.exists(os.path.join(path, "config.json")):
        from export_weights import read_hf_folder  # here: it needs PyTorch

        return read_hf_folder(path)
    path = model_file(path)
    with open_input(path, export_hint(path)) as f:
        magic = int.from_bytes(f.read(4), "little")
    module, name = PAGES.get(magic, PAGES[MODEL_MAGIC])  # GPT-2's refuses a file of another kind
    architecture = getattr(importlib.import_module(module), name)
    return architecture, *read_model(path, architecture)
