"""llmc.api.load, on both devices: a loss, a text, training steps with the trainer's bits, what is refused."""

import math
import os
import re

import numpy as np
import pytest

from conftest import BYTES, ROOT, SMALL, SMALL_HEADS, SMALL_LLAMA, make_model, random_params, run_program
from llmc import api
from llmc.checkpoint import write_model
from llmc.dataloader import write_tokens
from llmc.errors import UserError

DEVICES = pytest.mark.parametrize("page, options", (
    ("train_gpt2", {}), pytest.param("train_gpt2_cuda", {"B": 3, "dtype": "float32"}, marks=pytest.mark.gpu),
    pytest.param("train_gpt2_cuda", {"B": 3, "dtype": "bfloat16"}, marks=pytest.mark.gpu)), ids=str)


def load(page, path="gpt2_124M.bin", **options):
    if page == "train_gpt2_cuda":
        write_model("gpt2_124M.bin", SMALL_HEADS, random_params(SMALL_HEADS))
    return api.load(path, page == "train_gpt2_cuda", **options)


@DEVICES
def test_a_text(workplace, page, options):
    """Longer than the model sees, so that it is read in pieces."""
    model, text = load(page, **options), "€: a text of more than 65 bytes, some of which are in a piece of their own"
    ids = model.tokenizer.encode(text)
    assert model.tokenizer.decode(ids) == text and bytes(ids) == text.encode() and len(ids) > model.T + 1
    check, losses = make_model(1, model.T, config=model.config), []
    for begin in range(0, len(ids) - 1, model.T):
        piece = np.array([ids[begin : begin + model.T + 1]])
        losses += check.losses(piece[:, :-1], piece[:, 1:])[0].tolist()
    tolerance = 1e-6 if page == "train_gpt2" else 1e-2
    assert abs(model.loss(text) - np.mean(losses)) < tolerance * np.mean(losses) and model.loss(ids) == model.loss(text)
    assert model.generate(text, tokens=9).startswith(text) and model.generate(tokens=5) == model.generate(tokens=5)
    likeliest = model.generate([1, 2], tokens=3, temperature=0)
    assert likeliest[:2] == [1, 2] and len(likeliest) == 5 and all(isinstance(id, int) for id in likeliest)


@DEVICES
def test_training_steps_are_the_trainer_s(workplace, page, options):
    """Loss and model after three updates: the same bits, whatever comes between the steps."""
    T, flags = 32, ("--dtype", options["dtype"]) if options else ()
    write_tokens("data/tiny_shakespeare_train.bin", [np.random.default_rng(0).integers(0, 257, 9 * T + 1)], 9 * T + 1)
    model = load(page, weight_decay=0.1, grad_clip=0.5, **options, **({"T": T} if options else {}))
    done = run_program(f"{page}.py", "-b", 3, "-t", T, "-x", 3, "-l", 1e-3, "-c", 0.1, "--grad_clip", 0.5, "-v", 0,
                       "-s", 0, "-o", "run", *flags)
    ids = np.fromfile("data/tiny_shakespeare_train.bin", "<i4")
    for step in range(3):
        rows = ids[3 * T * step : 3 * T * (step + 1) + 1]
        loss = model.forward(rows[:-1].reshape(3, T), rows[1:].reshape(3, T))
        model.backward()
        assert model.loss("between") > 0 and model.generate(tokens=2)
        model.update(1e-3)
        assert f"{step + 1}/3 | train loss {loss:.4f}" in done.stdout
    model.save("python/model.bin")
    with open("run/model_00000003.bin", "rb") as trained, open("python/model.bin", "rb") as saved:
        assert trained.read() == saved.read()
    assert load(page, "python/model.bin", **options).tokenizer.tokens == BYTES


@DEVICES
def test_what_is_refused(workplace, page, options):
    model, ids = load(page, **options), np.zeros((3, 16), int)
    model.forward(*np.zeros((2, 3, model.T), int))
    model.backward()
    os.mkfifo("pipe")
    for call, words in (
        (lambda: model.update(-1), "learning_rate -1"), (lambda: model.update(math.nan), "nan"),
        *((lambda flag=flag: model.generate("a", **flag), f"{[*flag][0]} .*expected") for flag in (
            {"temperature": -1}, {"temperature": "1"}, {"top_k": -1}, {"top_p": 0}, {"tokens": 0}, {"seed": 2**64})),
        (lambda: model.save("pipe"), "is no file"), (lambda: model.save("data"), "is no file"),
        (lambda: model.loss("a\ud800"), "lone surrogate"), (lambda: model.forward(ids[:0], ids[:0]), "shape"),
        (lambda: model.forward(ids - 1, ids), "from -1"), (lambda: load(page, **options).backward(), "of forward"),
        (lambda: load(page, **options).update(1), "a call of backward"),
        (lambda: (model.forward(ids, ids), model.loss("ab"), model.backward()), "right before"),
        (lambda: model.forward(ids[0], ids[0]), "expected integers"), (lambda: model.forward(ids, ids[1:]), "shape"),
        (lambda: model.forward(ids / 2, ids / 2), "float64"), (lambda: model.forward(ids + 257, ids), "0 to 256"),
        (lambda: model.forward(*np.zeros((2, 1, 65), int)), "at most 32|room for"), (lambda: model.loss("a"), "2"),
        (lambda: load(page, weight_decay=-1), "weight_decay"), (lambda: load(page, schedule="cosine"), "expected"),
        (lambda: load(page, "nowhere"), "no such file")):
        with pytest.raises(UserError, match=words):
            call()


@pytest.mark.parametrize("config", (SMALL, SMALL_LLAMA))
def test_batches_may_grow(workplace, config):
    """AdamW's moments stay when a larger batch comes. Of either page, which the file's magic number says. Weights that
    are not finite are not saved."""
    write_model("gpt2_124M.bin", config, random_params(config))
    os.unlink("gpt2_tokenizer.bin")
    models, ids = (load("train_gpt2"), load("train_gpt2")), np.arange(4 * 16).reshape(4, 16)
    assert models[0].generate([1, 2], 3)[:2] == [1, 2] and type(models[0].model).Config is type(config)
    models[1].forward(ids, ids)  # has the room from the start
    for model in models:
        for B in (1, 4, 2):
            model.forward(ids[:B], ids[:B])
            model.backward()
            model.update(1e-3)
    assert np.array_equal(*(model.model.params.buffer for model in models))
    models[0].model.params.lnfw[3] = math.inf
    with pytest.raises(UserError, match="new/x.bin: tensor lnfw .* it is not saved"):
        models[0].save("new/x.bin")
    assert not os.path.exists("new")


def test_the_page_of_the_documentation(workplace, capsys):
    page = (ROOT / "doc" / "python.md").read_text()
    (workplace / "README.md").write_text(page)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(block.replace('"runs/first"', '"gpt2_124M.bin"'), names)
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[1]) for line in lines if re.fullmatch(r"\d+ \d\.\d+", line)]
    assert len(losses) == 20 and losses[-1] < losses[0] and len(lines) > 24
    assert api.load("runs/tuned/model.bin").loss(page) < api.load("gpt2_124M.bin").loss(page)
