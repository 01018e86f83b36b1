"""look.py's page: what it is told is right, by PyTorch or by another way to the same numbers; what
it shows and computes, in a real browser, is NumPy's, for each kind of tensor; how it is used; what
is refused."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import look
import train_speedrun
from conftest import BYTES, SMALL_HEADS, SMALL_LLAMA, random_params, trainer_of
from llmc.api import load
from llmc.checkpoint import write_model
from llmc.resume import checkpoint_paths
from llmc.tensors import flat, views
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
PAGES = pytest.mark.parametrize("page", CONFIGS, ids=("GPT-2", "Llama", "speedrun"))


def train(run_here, page):
    """A run with three checkpoints, whose vocabulary is bytes; returns its directory."""
    write_tokenizer("data/tiny_shakespeare_tokenizer.bin", BYTES, 256)
    params = random_params(CONFIGS[page], ones=1.0)
    if page is Speedrun:
        params.wte *= 10  # as large as its random weights, so that their decay shows
    write_model("start.bin", CONFIGS[page], params)
    flags = "-e start.bin -x 6 -n 2 -b 2 -t 32 -v 0 -s 0 -l 0.01 -o run".split()
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
    """open_page(width) writes and opens the page: (its Page, look's data, the Recorder). It logs no
    error."""
    data, recorder, _ = looked
    look.write_page("look.html", data, recorder.numbers)
    errors, contexts = [], []

    def show(width=1440):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}))
        shown = contexts[-1].new_page()
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
    torch = pytest.importorskip("torch")
    model = load(path).model
    weights = flat(model.params)
    weights[...] = torch.tensor(weights).bfloat16().float().numpy()
    ids = np.array([[*PROMPT.encode()]], np.int32)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    model.allocate_activations(*inputs.shape)
    model.allocate_training(*inputs.shape)
    model.forward(inputs, targets)
    model.backward()
    return model, inputs, targets


@PAGES
def test_the_update_is_pytorch_s(looked, page):
    """By the moments of the run's newest checkpoint, of each tensor by its name; and by the numbers
    that the page makes it of."""
    from test_pages import InPyTorch  # which wants torch
    data, recorder, path = looked
    model, *_ = begin(page, path)
    params, told, settings = model.params, data["update"], page.Settings()
    numbers = np.concatenate(recorder.numbers)
    state = np.fromfile(checkpoint_paths(path, 6)[1], "<f4", 2 * flat(params).size, offset=1024)
    moments = np.split(state.view(np.uint8), 2)
    model.optimizer.m, model.optimizer.v = (views(params.table, buffer) for buffer in moments)
    expected = InPyTorch(page, params, model.optimizer, settings, step=6)
    expected.update(model.grads, settings.learning_rate)

    moves = {}
    for call in data["calls"]:
        if "move" not in call["outs"]:
            continue
        tensor, sizes = data["tensors"][call["outs"]["move"]], call["sizes"]
        name, l = tensor["name"], tensor["layer"]
        after, weight, m, v = (np.asarray(x)[() if l == "" else l] for x in (
            expected.tensors[name], getattr(params, name), expected.m[name], expected.v[name]))
        moves[name, l] = move = after - weight
        for i, kept in zip(np.unravel_index(np.abs(move).argmax(), move.shape), tensor["whole"]):
            assert i in kept, name

        weight, m, v, move = (x[np.ix_(*tensor["whole"])] for x in (weight, m, v, move))
        near = dict(rtol=0, atol=3e-7 + 2e-4 * np.abs(move).max(), err_msg=name)
        np.testing.assert_allclose(recorder.contents[call["outs"]["move"]], move, **near)
        for what, right in (("m", m), ("v", v)):
            found = numbers[sizes[what] :][: right.size].reshape(right.shape)
            np.testing.assert_allclose(found, right, 1e-4, 1e-6 * np.abs(right).max(), err_msg=name)
        if call["f"] == "adamw_update":  # as in formulas.js
            m /= 1 - told["beta1"] ** told["step"]
            v /= 1 - told["beta2"] ** told["step"]
            change = m / (np.sqrt(v) + told["eps"]) + told["weight_decay"] * weight
            np.testing.assert_allclose(-sizes["rate"] * change, move, **near)
    assert len(moves) == sum(row.shape[0] if row.stacked else 1 for row in params.table.values())
    lengths = np.linalg.norm(moves["wte", ""], axis=1)
    found = [lengths[id] for id, _ in told["embeddings"]]
    assert found == pytest.approx(-np.sort(-lengths)[:12], rel=1e-4)


def logits_of(page, params, residual):
    """The classifier's logits of a residual stream (T, C), in float64."""
    x = residual.astype(np.float64)
    x = x - x.mean(-1, keepdims=True) if page is GPT2 else x
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * params.lnfw
    if page is GPT2:
        return (x + params.lnfb) @ params.wte[:257].T
    logits = x @ params.lm_head[:257].T
    if page is Llama3:
        return logits
    logits = logits + params.lm_headb[:257]
    return 15 * logits / np.sqrt(logits**2 + 15**2)


@PAGES
def test_guesses_are_those_of_each_layer(looked, page):
    """The likeliest tokens by each layer's residual stream, also by the last one's."""
    data, _, path = looked
    model, *_ = begin(page, path)
    streams = [model.acts.encoded[0], *model.acts.residual3[:, 0]]
    for guesses, residual in zip(data["guesses"], streams, strict=True):
        logits = logits_of(page, model.params, residual)
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        for row, found in zip(probs, guesses, strict=True):
            assert [p for _, p in found] == pytest.approx(-np.sort(-row)[:5], abs=1e-4)
            assert [row[id] for id, _ in found] == pytest.approx(-np.sort(-row)[:5], abs=1e-4)


@PAGES
def test_what_each_loss_depends_on(looked, page, monkeypatch):
    """How each loss changes as one position's embedding, where the first layer reads it, becomes
    longer."""
    data, recorder, path = looked
    model, inputs, targets = begin(page, path)
    T, module, columns = inputs.size, sys.modules[page.__module__], []
    name = "rmsnorm_forward" if page is Speedrun else "encoder_forward"  # what writes it
    right = getattr(module, name)

    def losses(position, times):
        def longer(out, *arguments):
            right(out, *arguments)
            if out.ctypes.data == model.acts.encoded.ctypes.data:
                out[0, position] *= np.float32(times)

        monkeypatch.setattr(module, name, longer)
        return model.losses(inputs, targets)[0].astype(np.float64)

    for position in range(T):
        columns.append((losses(position, 1.01) - losses(position, 0.99)) / 0.02)
    expected = np.stack(columns, axis=1)
    found = np.concatenate(recorder.numbers)[data["depends"] :][: T * T]
    assert np.abs(found.reshape(T, T) - expected).max() < 0.01 * np.abs(expected).max()


@PAGES
def test_the_film_is_of_the_checkpoints(looked, page):
    data, recorder, path = looked
    _, inputs, targets = begin(page, path)
    for frame, step in zip(data["film"], (2, 4, 6), strict=True):
        model = look.load_rounded(checkpoint_paths(path, step)[0])
        loss, acts = model.forward(inputs, targets), model.model.acts
        assert frame["step"] == step and frame["loss"] == pytest.approx(loss, rel=1e-6)
        att = np.concatenate(recorder.numbers)[frame["att"] :][: acts.att.size]
        assert np.abs(att.reshape(acts.att.shape) - acts.att).max() <= 1 / 64 + 1e-6
        streams = acts.encoded, *acts.residual3
        assert frame["norms"] == pytest.approx([np.sqrt(np.mean(x**2)) for x in streams], rel=1e-5)
        assert frame["losses"] == pytest.approx(acts.losses[0].tolist())


def number(text):
    return float(text.replace("−", "-").replace("Infinity", "inf"))


BYTES_OF = """i => {  // of a move, what its explanation says: the page is given its numbers
    const tensor = tensors[i], numbers = tensor.kind === "move" ? tensor.computed() : tensor.data;
    return Array.from(new Uint8Array(Float32Array.from(numbers).buffer), byte =>
        String.fromCharCode(byte)).join("");
}"""  # much faster than a list


@PAGES
def test_numbers_are_numpy_s(open_page):
    """Every number of every tensor; one of each that a function writes is shown to three digits, and explained."""
    page, data, recorder = open_page()
    shown, rng = {}, np.random.default_rng(0)
    for i, tensor in enumerate(data["tensors"]):
        computed, expected = page.evaluate(BYTES_OF, i).encode("latin-1"), recorder.contents[i].ravel()
        near = 1e-5 * np.abs(expected[np.isfinite(expected)]).max()
        near += 3e-7 * (tensor["kind"] == "move")  # of a difference of weights, which were rounded
        np.testing.assert_allclose(np.frombuffer(computed, "<f4"), expected, rtol=1e-4, atol=near, err_msg=str(tensor))
        if tensor["by"] is not None:
            shown[recorder.calls[tensor["by"]]["f"], tensor["arg"]] = i
        else:  # nothing else is given: what the backward pass reads, the forward pass wrote
            assert tensor["kind"] == "params" or tensor["arg"] in ("inp", "targets", "dlosses", "cos", "sin"), tensor
    assert {f for f, _ in shown} == {call["f"] for call in recorder.calls} <= set(data["source"]) and len(shown) >= 20
    for (f, argument), i in shown.items():
        content = recorder.contents[i].reshape(data["tensors"][i]["shape"])
        index = rng.integers(content.shape)
        page.evaluate("([i, index]) => { location.hash = tensors[i].href(index); }", [i, index.tolist()])
        page.wait_for_function("([i, index]) => state.tensor?.number === i && `${state.index}` === `${index}`",
                               arg=[i, index.tolist()])
        expected, near = float(content[tuple(index)]), 1e-5 * np.abs(content[np.isfinite(content)]).max()
        for value in map(number, page.locator("#detail output").all_inner_texts()):  # shown, and explained
            assert value == expected or abs(value - expected) <= near + 0.0051 * abs(expected), (f, argument, index)
        assert page.locator(".made b").count() and page.locator("pre mark").count() == 1, (f, argument)
    page.evaluate("location.hash = tensors.find(tensor => tensor.arg === 'dlosses').href([0])")
    page.wait_for_selector("text=It is given.")


@PAGES
def test_update_guesses_and_film(open_page):
    """The largest move is explained; the last guesses are the model's; the slider goes back to the first checkpoint."""
    page, data, _ = open_page()
    page.click("nav >> text=update")
    page.click("#detail table a")
    assert number(page.inner_text("#value")) and "p -= t" in page.inner_text("pre mark")
    page.click("nav >> text=guesses")
    page.wait_for_selector(".guess")
    assert page.locator(".guess").count() == (data["L"] + 1) * (len(data["ids"]) - 1)
    page.evaluate("location.hash = '#attention/none'")  # no such tensor
    page.click("text=head 1 >> nth=1")
    page.wait_for_selector("h2:text('att of layer 2')")
    assert page.locator("details a").count() == min(8, len(data["ids"]) - 1) == 8
    page.click("nav >> text=training")
    for key, step in (("ArrowRight", 6), ("ArrowLeft", 4), ("ArrowLeft", 2)):
        page.press("#frame", key)
        page.wait_for_selector(f"h2:text('at step {step}:')")
    sizes = page.locator("tr:has-text('after layer 2') td").all_inner_texts()[1:]
    assert [f"{number(x):.2e}" for x in sizes] == [f"{frame['norms'][2]:.2e}" for frame in data["film"]]


@PAGES
def test_it_is_used_by_click_and_key_in_both_themes(open_page, width=390):  # of a telephone
    page, data, _ = open_page(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width and page.locator("b").count() == 0
    assert page.locator("#prompt a").count() == len(data["ids"]) - 1 == len(PROMPT.encode()) - 1
    page.click('[href="#forward/qkv|1/"]')
    page.wait_for_selector("#value")
    assert page.locator(".down span").all_inner_texts() == ["query", "key", "value"]
    canvas = page.locator(".big canvas")
    canvas.click(position={"x": canvas.bounding_box()["width"] * 1.5 / (len(data["ids"]) - 1), "y": 3})
    page.wait_for_function("state.index[0] === 1")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("state.index[0] === 2")
    before = page.evaluate("getComputedStyle(document.body).color")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).color") != before and page.inner_text("#value")
    page.locator("h2").first.click()
    page.keyboard.press("Escape")
    page.wait_for_function("state.key === ''")
    page.keyboard.type("/dfch 2\n")
    page.wait_for_function("state.mode === 'backward' && state.key === 'fch|1'")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_what_is_refused(workplace, run_here, monkeypatch):
    train(run_here, GPT2)
    for flag, value, words in (("--prompt", "ab", "2 tokens, expected 3 to 65"),
                               ("--prompt", "", "0 tokens"),
                               ("--tokenizer", "none.bin", "no such file"),
                               ("-o", "none/x.html", "none/x.html: cannot be written")):
        run_here(look, "run", "--open", 0, flag, value, fails=[words])
    monkeypatch.setattr(look, "MOST_MB", 0.01)
    run_here(look, "run", "--open", 0, fails=["the page would have 0 MB, of at most 0.01"])


def test_it_writes_over_its_own_pages_alone(workplace, run_here):
    """Whatever the name is, also by a link."""
    train(run_here, GPT2)
    Path("notes.html").write_text("<!doctype html>\n<html lang=\"en\">\n<title>Mine</title>\n")
    Path("empty").touch()
    Path("link.html").symlink_to("start.bin")
    os.mkfifo("pipe")
    files = {path: path.read_bytes() for path in workplace.rglob("*") if path.is_file()}
    model, state, marker = checkpoint_paths("run", 6)
    for name in ("start.bin", "link.html", model, state, marker, "run/tokenizer.bin", "notes.html",
                 "empty", "run", "pipe", "/dev/null", ""):
        run_here(look, "run", "-o", name, fails=[f"-o {name}: is no page of look.py's", "another"])
    assert {path: path.read_bytes() for path in workplace.rglob("*") if path.is_file()} == files
    for _ in range(2):
        assert run_here(look, "run", "--open", 0).stdout.startswith("look.html: ")


def test_a_state_that_is_not_the_run_s(workplace, run_here):
    """Of a damaged one, or another model's: a line, and no page. Of several GPUs, as without any: a
    first update."""
    train(run_here, GPT2)
    model, state, marker = map(Path, checkpoint_paths("run", 6))
    good, header = state.read_bytes(), np.fromfile(state, "<i4", 256)
    command = look, "run", "--open", 0, "-o", "page.html"

    def with_header(**slots):
        changed = header.copy()
        for slot, value in slots.items():
            changed[int(slot[1:])] = value
        return changed.tobytes() + good[1024:]

    nan = np.array([np.nan], "<f4").tobytes()
    for data, words in ((good[:-1], "cut short"), (good[:1000], "1000 bytes"), (b"", "0 bytes"),
                        (model.read_bytes(), "is a GPT-2 checkpoint"),
                        (with_header(h1=3), "version 3"), (good[:-4] + nan, "v: NaN"),
                        (with_header(h10=4), "of step 4, expected step 6"),
                        (Path(checkpoint_paths("run", 4)[1]).read_bytes(), "of step 4"),
                        (with_header(h44=1), f"{model} is not the model")):
        state.write_bytes(data)
        run_here(*command, fails=[state, words, f"update of its model: python look.py {model}"])
    state.unlink()
    run_here(*command, fails=[state, "no such file"])
    assert not Path("page.html").exists()

    state.write_bytes(with_header(h1=2, h2=2)[: -len(good) // 4])  # its half
    note = run_here(*command).stderr
    assert note.startswith(f"note: the update shown is a first one: {state}: is of 2 ranks")
    first, _ = look.look(str(model), "The cat")
    shared, _ = look.look("run", "The cat")
    assert first["update"] == shared["update"] and first["update"]["step"] == 1
