"""A model from Python, on the CPU or a GPU: its loss, text from it, a training step. doc/python.md
shows how.

    from llmc.api import load
    model = load("runs/mine")  # on a GPU: load("runs/mine", gpu=True)
    print(model.loss("A sentence."), model.generate("The ", tokens=40))
"""

import importlib
import math
import os
import sys
from numbers import Integral, Real

import numpy as np

from llmc.checkpoint import read_model, without_padding, write_model
from llmc.errors import UserError
from llmc.files import export_hint, make_directory, open_input
from llmc.huggingface import read_hf_folder
from llmc.resume import model_file
from llmc.sampler import Choice, Random, draw, end_of_text
from llmc.tensors import check_finite
from llmc.tokenizer import keep_tokenizer
from llmc.vocabulary import load_vocabulary


def pages():
    """The classes of the pages, imported when needed: llmc/ does not depend on them."""
    names = {"train_gpt2": "GPT2", "train_llama3": "Llama3", "train_speedrun": "Speedrun"}
    return [getattr(importlib.import_module(module), name) for module, name in names.items()]


def architecture_of(model):
    """The page's class for a name of random weights, a .bin file (by its magic number) or a run's
    directory."""
    all_pages = pages()
    for page in all_pages:
        if model in page.SIZES:
            return page
    if os.path.exists(os.path.join(model, "config.json")):
        return all_pages[0]  # a trainer refuses a Hugging Face folder, and says how to convert it
    path = model_file(model, "last") if os.path.isdir(model) else model_file(model)
    with open_input(path, export_hint(path)) as f:
        magic = int.from_bytes(f.read(4), "little")
    # which refuses another kind of file
    return next((page for page in all_pages if page.MAGIC == magic), all_pages[0])


def on_gpu(architecture):
    """The class of the page for GPUs."""
    return getattr(importlib.import_module(f"{architecture.__module__}_cuda"),
                   architecture.__name__)


def load_model(path, checkpoint=""):
    """(architecture, config, params) of a run's directory, a .bin file or a Hugging Face folder.
    checkpoint: of a run: "best", "last" or a step; "": see model_file."""
    if os.path.exists(os.path.join(path, "config.json")) and not checkpoint:
        return read_hf_folder(path, *pages()[:2])
    path = model_file(path, checkpoint)
    return (architecture := architecture_of(path)), *read_model(path, architecture)


def load_with_vocabulary(path, tokenizer="", checkpoint="", is_needed=True):
    """As load_model, and the Vocabulary, or None: of a file, or of those beside the model. Rows
    without a token are padding. is_needed: a vocabulary that cannot be read raises UserError; else
    it is a warning, and None."""
    architecture, config, params = load_model(path, checkpoint)
    try:
        vocabulary = load_vocabulary(path, config.V, tokenizer)
    except UserError as error:
        if is_needed or tokenizer:
            raise
        print(f"warning: {error}: tokens are printed as ids", file=sys.stderr)
        vocabulary = None
    if vocabulary:
        config = without_padding(config, params, len(vocabulary.tokens))
    return architecture, config, params, vocabulary


def load(path, gpu=False, **options):
    """The Model, or GpuModel, of a run's directory, a .bin file or a Hugging Face folder."""
    return (GpuModel if gpu else Model)(path, **options)


def check_numbers(whence, **values):
    """Raise UserError, which begins with `whence`, for an impossible value; None is a default."""
    for name, kind, is_right, expected in (
        ("tokens", Integral, lambda x: 1 <= x < 2**31, "1 to 2^31 - 1"),
        ("samples", Integral, lambda x: 1 <= x < 2**16, "1 to 65535"),
        ("temperature", Real, lambda x: 0 <= x < math.inf, "0 or more, and finite"),
        ("top_k", Integral, lambda x: x >= 0, "0 or more"),
        ("top_p", Real, lambda x: 0 < x <= 1, "more than 0, and at most 1"),
        ("seed", Integral, lambda x: 1 <= x < 2**64, "1 to 2^64 - 1"),
        ("learning_rate", Real, lambda x: 0 <= x < math.inf, "0 or more, and finite")):
        if ((value := values.get(name)) is not None
                and not (isinstance(value, kind) and is_right(value))):
            raise UserError(f"{whence}{name} {value!r}: expected {expected}")


class Model:
    """A model on the CPU."""

    OPTIONS = "beta1", "beta2", "eps", "weight_decay", "grad_clip"

    def __init__(self, path, tokenizer="", checkpoint="", **options):
        """path: a run's directory, a .bin file or a Hugging Face folder
        tokenizer: a file, if it is not beside the model
        checkpoint: of a run: "best", "last" or a step; "": the best where --patience has kept it
        options: of AdamW, with the trainer's defaults

        Raises UserError for files or options that are wrong."""
        if unknown := options.keys() - set(self.OPTIONS):
            raise UserError(f"{min(unknown)}: no such option: expected tokenizer, checkpoint,"
                            f" {', '.join(self.OPTIONS)}")
        found = load_with_vocabulary(path, tokenizer, str(checkpoint))
        architecture, self.config, params, self.tokenizer = found
        # updates so far; what backward and update read
        self.steps, self.batch, self.has_gradients = 0, None, False
        self.open(architecture, params, options)

    def loss(self, text):
        """The mean loss of a text or ids, in nats a token: of all but the first. A long text is cut
        into contexts."""
        ids = self.ids(text)
        if len(ids) < 2:
            raise UserError(f"a text of {len(ids)} tokens: a loss needs at least 2")
        total = 0.0
        for begin in range(0, len(ids) - 1, self.T):
            context = ids[None, begin : begin + self.T + 1]
            total += self.losses(context[:, :-1], context[:, 1:]).sum(dtype=np.float64)
        return float(total / (len(ids) - 1))

    def generate(self, prompt="", tokens=100, temperature=1.0, top_k=0, top_p=1.0, seed=1337):
        """Continue a prompt, or begin a text, by at most `tokens` tokens, up to the end of the
        text. A text gives a text, ids give ids, the prompt included."""
        check_numbers("", tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                      seed=seed)
        eot = end_of_text(self.tokenizer, self.config.V)
        shown = self.ids(prompt).tolist()
        vocabulary = self.tokenizer
        start = np.array([shown or [eot]], np.int32)
        stops = vocabulary.stops if vocabulary else {eot}
        for (id,), _ in self.draw(start, tokens, [Random(seed)], Choice(temperature, top_k, top_p)):
            if id in stops:
                break
            shown.append(int(id))
        is_text = isinstance(prompt, str) and vocabulary
        return (vocabulary.decode([id for id in shown if id not in vocabulary.special]) if is_text
                else shown)

    def ids(self, text):
        """The ids (n,) int32 of a text, or the ids given."""
        if isinstance(text, str):
            if text and not self.tokenizer:
                raise UserError("the model has no vocabulary: pass ids, or load it with"
                                " tokenizer=FILE")
            text = self.tokenizer.encode(text) if text else []
        if len(text):
            self.check([text], [text])
        return np.array(text, np.int32)

    def losses(self, inputs, targets):
        """The losses (B, T) of the targets. Here and below, inputs and targets are integer ids (B,
        T)."""
        self.batch = None
        self.make_room(*self.check(inputs, targets))
        return self.model.losses(np.asarray(inputs), np.asarray(targets))

    def forward(self, inputs, targets, weights=None, total=None):
        """The mean loss, a float. With weights (B, T), real numbers, also negative ones, it is the
        sum of weights * losses over `total`, by default the sum of the weights."""
        self.make_room(*self.check(inputs, targets))
        self.batch = np.asarray(inputs), np.asarray(targets)
        if weights is not None or total is not None:
            self.batch += self.check_weights(np.shape(inputs), weights, total), total
        return self.model.forward(*self.batch)

    def backward(self):
        """Compute the gradients of the last forward pass's loss."""
        if self.batch is None:
            raise UserError("backward: expected a call of forward right before it")
        self.compute_gradients()
        self.batch = None
        self.has_gradients = True

    def update(self, learning_rate):
        """One step of AdamW."""
        if not self.has_gradients:
            raise UserError("update: expected a call of backward before it")
        check_numbers("update: ", learning_rate=learning_rate)
        self.steps = self.steps + 1
        self.has_gradients = False
        self.adamw(learning_rate)

    def check(self, inputs, targets):
        """The shape (B, T) of a batch; raises UserError unless it consists of valid ids."""
        shape = np.shape(inputs)
        inputs = np.asarray(inputs)
        targets = np.asarray(targets)
        for ids in (inputs, targets):
            if len(shape) != 2 or ids.shape != shape or not ids.size or ids.dtype.kind not in "iu":
                raise UserError(f"inputs of shape {shape}, targets of shape {targets.shape},"
                                f" {ids.dtype}: expected integers (B, T)")
            if not 0 <= ids.min() <= ids.max() < self.config.V:
                raise UserError(f"ids from {ids.min()} to {ids.max()}: expected 0 to"
                                f" {self.config.V - 1}")
        return shape

    def check_weights(self, shape, weights, total):
        """The weights (B, T) float32; raises UserError for impossible ones."""
        found = np.asarray(weights, np.float32)
        if found.shape != shape or not np.isfinite(found).all():
            raise UserError(f"weights of shape {found.shape}: expected finite numbers {shape}")
        if total is None and np.sum(found, dtype=np.float64) == 0:
            raise UserError("weights: their sum is 0, by which the loss is divided: pass total=")
        if total is not None and not (math.isfinite(total) and total > 0):
            raise UserError(f"total {total}: expected a positive number")
        return found

    def save(self, path):
        """Write a .bin file, and the vocabulary beside it as tokenizer.bin."""
        if os.path.lexists(path) and not os.path.isfile(path):
            raise UserError(f"{path}: is no file, expected the name of one")
        params, version = self.on_host()
        check_finite(path, params, "it is not saved")
        make_directory(os.path.dirname(path))
        if self.tokenizer:
            keep_tokenizer(os.path.dirname(path), self.tokenizer)
        write_model(path, self.config, params, version)

    def open(self, architecture, params, options):
        self.settings = architecture.Settings(**options)
        self.T = self.config.maxT
        self.settings.check()
        self.model = architecture(self.config, params)
        self.room = (0, 0)
        self.room_to_train = (0, 0)

    def draw(self, *arguments):
        return draw(self.model.Decoder(self.config, self.model.params, 1, self.T), *arguments)

    def make_room(self, B, T):
        """Activations grow with the batches. Raises UserError for sequences that are longer than
        the model's."""
        if T > self.T:
            raise UserError(f"sequences of {T} tokens: the model sees at most {self.T}")
        if B > self.room[0] or T > self.room[1]:
            self.room = max(B, self.room[0]), max(T, self.room[1])
            self.model.allocate_activations(*self.room)

    def compute_gradients(self):
        if self.room_to_train != self.room:
            self.room_to_train = self.room
            self.model.allocate_training(*self.room)
        self.model.backward()

    def adamw(self, learning_rate):
        model = self.model
        _, scale = self.model.norm_and_scale(self.settings)
        model.optimizer.update(model.params, model.grads, self.settings, learning_rate, self.steps,
                               scale)

    def on_host(self):
        return self.model.params, 3


class GpuModel(Model):
    """A model on the GPU. Memory for batches of B sequences of T tokens is allocated at the start;
    a training step needs a full batch. dtype: "bfloat16", "fp8" or "float32"."""

    OPTIONS = *Model.OPTIONS, "B", "T", "dtype"

    def open(self, architecture, params, options):
        from llmc.gpu.device import open_gpu
        from llmc.gpu.trainer import open_trainer
        architecture = on_gpu(architecture)
        gpu = open_gpu()
        settings = architecture.Settings(**{"T": min(1024, self.config.maxT), "graph": 0,
                                            **options})
        settings.check()
        if settings.T > self.config.maxT:
            raise UserError(f"T={settings.T}: the model sees at most {self.config.maxT} tokens")
        self.settings = architecture.resolve_auto(settings, gpu.arch)
        self.T = settings.T
        self.model = open_trainer(architecture, gpu, self.config, params, self.settings)

    def draw(self, *arguments):
        return self.model.decoder.draw(*arguments)

    def make_room(self, B, T):
        if B > self.settings.B or T > self.T:
            raise UserError(f"a batch of {(B, T)} tokens, room for {(self.settings.B, self.T)}:"
                            " load the model with a larger B or T")

    def compute_gradients(self):
        found = self.batch[0].shape
        shape = (self.settings.B, self.T)
        if found != shape:
            raise UserError(f"a batch of {found} tokens, expected {shape} to train: load the model"
                            " with another B or T")
        self.model.compute_gradients(*self.batch)

    def adamw(self, learning_rate):
        self.model.update_now(learning_rate)

    def on_host(self):
        from llmc.gpu.saver import params_now
        return params_now(self.model), 5 if self.settings.precision.bf16 else 3
