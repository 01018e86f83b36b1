"""A run of each model, as look.py sees it, and its page in a real browser: fixtures."""

import dataclasses
import shutil

import numpy as np
import pytest

import look
import train_speedrun
from conftest import BYTES, SMALL_HEADS, SMALL_LLAMA, random_params, trainer_of
from llmc.checkpoint import write_model
from llmc.tokenizer import write_tokenizer
from train_gpt2 import GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROMPT = "</script><b>\a\tשלום"
CONFIGS = {
    GPT2: SMALL_HEADS,
    Llama3: dataclasses.replace(SMALL_LLAMA, V=257, Vp=384),  # two groups of two heads
    Speedrun: train_speedrun.Config(maxT=64, V=257, L=2, NH=2, C=32, Vp=384),
}
SETTINGS = dict(learning_rate=0.01, schedule="linear", beta1=0.8, beta2=0.95, eps=1e-7, steps=6,
                weight_decay=0.1, grad_clip=0.5)  # of the runs
BYTES_OF = """i => Array.from(new Uint8Array(Float32Array.from(tensors[i].data).buffer), byte =>
    String.fromCharCode(byte)).join("")"""  # much faster than a list
PAGES = pytest.mark.parametrize("page", CONFIGS, ids=("GPT-2", "Llama", "speedrun"))


def train(run_here, page):
    """A run with three checkpoints, whose vocabulary is bytes; returns its directory."""
    write_tokenizer("data/tiny_shakespeare_tokenizer.bin", BYTES, 256)
    write_model("start.bin", CONFIGS[page], random_params(CONFIGS[page], ones=1.0))
    flags = ("-e start.bin -x 6 -n 2 -b 2 -t 32 -v 0 -s 0 -o run -l 0.01 -k linear --beta1 0.8"
             " --beta2 0.95 --eps 1e-7 -c 0.1 --grad_clip 0.5").split()
    run_here(trainer_of(page), *flags)
    return "run"


LOOKED = {}  # page -> (look's data, the Recorder, the directory), of a run that is made once


@pytest.fixture
def looked(workplace, run_here, tmp_path_factory, page):
    """(look's data, the Recorder, the directory of the run)."""
    if page not in LOOKED:
        path = shutil.copytree(train(run_here, page), tmp_path_factory.mktemp("looked") / "run")
        LOOKED[page] = *look.look(str(path), PROMPT), path
    return LOOKED[page]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("no browser: apt install chromium")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(looked, browser, tmp_path):
    """open_page(width, other) writes and opens the run's page, or another (data, Recorder): (its
    Page, look's data, the Recorder). It logs no error."""
    errors, contexts = [], []

    def show(width=1440, other=None):
        data, recorder = other or looked[:2]
        look.write_page("look.html", data, recorder.numbers)
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}))
        shown = contexts[-1].new_page()
        shown.set_default_timeout(8000)
        shown.on("console", lambda message: errors.append(message.text))
        shown.on("pageerror", lambda error: errors.append(str(error)))
        shown.goto(f"file://{tmp_path}/look.html")
        shown.wait_for_selector("#prompt a")
        return shown, data, recorder

    yield show
    for context in contexts:
        context.close()
    assert not errors


def begin(page, path):
    """(model, inputs, targets) of the prompt, after a forward and a backward pass."""
    model = look.load_rounded(path).model
    ids = np.array([[*PROMPT.encode()]], np.int32)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    model.allocate_activations(*inputs.shape)
    model.allocate_training(*inputs.shape)
    model.forward(inputs, targets)
    model.backward()
    return model, inputs, targets
