"""What look.py tells its page is right, by PyTorch or by another way to the same numbers; what is
refused."""

import json
import os
import re
import sys
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

import look
from conftest import ROOT
from looking import (BYTES_OF, PAGES, PROMPT, SETTINGS, begin, browser,  # noqa: F401  (fixtures)
                     looked, open_page, train)
from llmc.resume import checkpoint_paths
from llmc.schedulers import learning_rate_at
from llmc.tensors import flat, views
from train_gpt2 import GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun


@PAGES
def test_the_update_is_pytorch_s(looked, page):
    """By the run's settings, and by the moments of its newest checkpoint, rounded as the page has
    them; of each tensor by its name."""
    from test_pages import InPyTorch  # which wants torch
    data, recorder, path = looked
    model, *_ = begin(page, path)
    params, told = model.params, data["update"]
    settings = page.Settings(**SETTINGS)
    state = np.fromfile(checkpoint_paths(path, 6)[1], "<f4", 2 * flat(params).size, offset=1024)
    moments = np.split(look.rounded(state).view(np.uint8), 2)
    model.optimizer.m, model.optimizer.v = (views(params.table, buffer) for buffer in moments)
    expected = InPyTorch(page, params, model.optimizer, settings, step=6)
    norm = float(np.linalg.norm(flat(model.grads).astype(np.float64)))
    assert told["norm"] == pytest.approx(norm, rel=1e-5) and norm > settings.grad_clip
    flat(model.grads)[...] *= settings.grad_clip / norm
    rate = learning_rate_at(settings, 5)  # the last: the run is at its end
    assert told["rate"] == rate < settings.learning_rate and told["step"] == 7
    expected.update(model.grads, rate)

    moves = {}
    for call in data["calls"]:
        if "move" not in call["outs"]:
            continue
        tensor = data["tensors"][call["outs"]["move"]]
        name, l = tensor["name"], tensor["layer"]
        after, weight, *new = (np.asarray(x)[() if l == "" else l] for x in (
            expected.tensors[name], getattr(params, name), expected.m[name], expected.v[name]))
        moves[name, l] = move = after - weight
        near = dict(rtol=0, atol=3e-7 + 2e-4 * np.abs(move).max(), err_msg=name)
        found = recorder.contents[call["outs"]["move"]]
        np.testing.assert_allclose(found, move[: len(found)], **near)
        for what, right in zip("mv", new):
            if what in call["outs"]:
                found = recorder.contents[call["outs"][what]]
                near = dict(rtol=1e-3, atol=1e-6 * np.abs(right).max(), err_msg=name)
                np.testing.assert_allclose(found, right[: len(found)], **near)
    assert len(moves) == sum(row.shape[0] if row.stacked else 1
                             for row in params.table.values())


class Replay:
    """The forward pass again, in float64, with one tensor changed on the way: the calls that
    look.py recorded, on arrays of this test's own."""

    def __init__(self, data, recorder):
        self.data, self.recorder = data, recorder
        self.contents = [x.astype(np.float64 if x.dtype.kind == "f" else x.dtype)
                         for x in recorder.contents]

    def loss(self, number, change, only=None):
        """The loss with `change` added to tensor `number` as soon as it is there. only: the call
        that alone reads it changed."""
        made = {}  # tensor's number -> what it has now

        def array(n):
            return made.get(n, self.contents[n])

        def changed():
            return array(number) + change.reshape(array(number).shape)

        if self.data["tensors"][number]["by"] is None and only is None:
            made[number] = changed()
        for i, call in enumerate(self.data["calls"][: self.data["forward"]]):
            f, arguments = self.recorder.arguments[i]
            given = arguments | {name: array(n) for name, n in call["ins"].items()}
            for name, n in call["outs"].items():
                in_place = name in call["ins"]
                given[name] = given[name].copy() if in_place else np.empty_like(self.contents[n])
                made[n] = given[name]
            if i == only:
                name = next(name for name, n in call["ins"].items() if n == number)
                given[name] = changed()
            f(**given)
            if number in call["outs"].values():
                made[number][...] = changed()
                if number == call["outs"].get("att"):
                    gather(call, given)
        losses = self.data["calls"][self.data["forward"] - 1]["outs"]["losses"]
        return array(losses).mean()


def gather(call, given):
    """Compute an attention call's result from its probabilities."""
    out, att = given["out"][0], given["att"][0]
    T, heads = len(out), len(att)
    groups, size = call["sizes"].get("NKV", heads), out.shape[1] // heads
    value = given["inp"].reshape(T, -1, size)[:, heads + groups :]
    value = np.repeat(value, heads // groups, axis=1)
    out[...] = np.einsum("hts,shd->thd", att, value).reshape(T, -1)


def of_products(replay, call, direction, step):
    """The loss when the products of queries and keys of an attention call move by step * direction,
    before they are divided by sqrt(HS)."""
    sizes = call["sizes"]
    scale = 1 / np.sqrt(sizes.get("HS") or sizes["C"] / sizes["NH"])
    att = replay.recorder.contents[call["outs"]["att"]][0].astype(np.float64)
    with np.errstate(divide="ignore"):
        scores = np.log(att) + step * scale * direction
    changed = np.exp(scores)
    changed /= changed.sum(-1, keepdims=True)
    return replay.loss(call["outs"]["att"], changed - att)


@PAGES
def test_gradients_are_of_what_their_labels_name(open_page):
    """Of every gradient's title, as the page shows it: the loss's finite difference along that
    gradient, and for the number that has the largest, when what is named moves; the rest of the
    forward pass runs on, in float64."""
    page, data, recorder = open_page()
    shown = page.evaluate("""() => tensors.filter(t => t.kind === "gradient").map(t =>
        ({number: t.number, title: t.title, layer: t.layer, name: t.key.split("|")[0]}))""")
    titles = page.evaluate("tensors.map(t => [t.kind, t.title, t.layer])")
    replay, named = Replay(data, recorder), set()
    for gradient in shown:
        title, layer = gradient["title"], gradient["layer"]
        tensor = data["tensors"][gradient["number"]]
        g = np.frombuffer(page.evaluate(BYTES_OF, gradient["number"]).encode("latin-1"), "<f4")
        g = g.reshape(tensor["shape"]).astype(np.float64)
        largest = np.where(np.abs(g) == np.abs(g).max(), np.sign(g), 0.0)
        only, stem = None, data["calls"][tensor["by"]]["f"].removesuffix("_backward")
        if " by " in title:
            assert page is not None and stem == "qknorm", title  # of no tensor: it says so
            continue
        if title == "d(query · key)":
            call = next(c for c in data["calls"] if c["f"] == "attention_forward"
                        and data["tensors"][c["outs"]["att"]]["layer"] == layer)

            def loss(direction, step, call=call):
                return of_products(replay, call, direction, step)
        else:
            name = title[1:]
            if name.endswith(" before encoder"):  # the classifier's part alone
                name = name.removesuffix(" before encoder")
                only = data["forward"] - 3
            number = next(i for i, (kind, other, l) in enumerate(titles) if other == name
                          and l == layer and kind in ("params", "acts"))

            def loss(direction, step, number=number, only=only):
                return replay.loss(number, step * direction, only)
        for direction in (g / np.linalg.norm(g), largest):
            slope = (loss(direction, 1e-4) - loss(direction, -1e-4)) / 2e-4
            assert slope == pytest.approx((g * direction).sum(), rel=2e-3, abs=1e-7), (title, layer)
        named.add(title)
    assert {"dlogits", "datty", "dlnf", "dwte", "d(query · key)"} <= named
    if page is Llama3:
        assert {"dqkv", "dqkv before rope"} <= named


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
def test_guesses_are_those_of_each_layer(open_page, looked, page):
    """Each layer's residual stream, also the last one's, through the classifier."""
    shown, data, _ = open_page()
    model, *_ = begin(page, looked[2])
    streams = [model.acts.encoded[0], *model.acts.residual3[:, 0]]
    found = shown.evaluate("streams().map(lens).map(probs => Array.from(probs.data))")
    for probs, residual in zip(found, streams, strict=True):
        logits = logits_of(page, model.params, residual)
        expected = np.exp(logits - logits.max(-1, keepdims=True))
        expected /= expected.sum(-1, keepdims=True)
        assert np.abs(np.reshape(probs, expected.shape) - expected).max() < 1e-5


@PAGES
def test_what_each_loss_depends_on(open_page, looked, page, monkeypatch):
    """How each loss changes as one position's embedding, where the first layer reads it, becomes
    longer."""
    shown, data, _ = open_page()
    model, inputs, targets = begin(page, looked[2])
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
    expected = np.tril(np.stack(columns, axis=1))
    found = np.zeros_like(expected)
    for t, row in enumerate(shown.evaluate("inputs.map((_, t) => dependsOf(t))")):
        found[t, : t + 1] = row
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()


def exercises_of(page):
    """The numbers of those whose place is a page of this model."""
    others = {Llama3: range(16, 20), Speedrun: range(20, 24)}
    return others.get(page) or {*range(1, 29)} - {n for numbers in others.values() for n in numbers}


@PAGES
def test_exercises_link_to_it(looked, page):
    data, recorder = looked[:2]

    def keys(tensors):
        return {t["name"] + (f" before {t['before']}" if t.get("before") else "") + f"|{t['layer']}"
                for t in tensors}

    shown = {"forward": keys(t for t in data["tensors"] if t["kind"] in ("params", "acts")),
             "backward": keys(data["tensors"][number] for number in data["gradients"]),
             "update": keys(t for t in data["tensors"] if t["kind"] == "move")}
    text = (ROOT / "exercises" / "README.md").read_text("utf-8")
    found = re.findall(r"<summary>(\d+) .*\n\nOn the page: (.*)", text)
    assert {int(number) for number, _ in found} == {*range(1, 29)} - {26, 27}
    for number, line in found:
        links = re.findall(r"\(\.\./look\.html#(\w+)/(.*?)\)", line)
        assert links
        for mode, key in links if int(number) in exercises_of(page) else ():
            assert unquote(key) in shown[mode], (number, key)


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
        changed[45:47] = 0  # without a CRC-32 of the file
        for slot, value in slots.items():
            changed[int(slot[1:])] = value
        return changed.tobytes() + good[1024:]

    nan = np.array([np.nan], "<f4").tobytes()
    for data, words in ((good[:-1], "cut short"), (good[:1000], "1000 bytes"), (b"", "0 bytes"),
                        (model.read_bytes(), "is a GPT-2 checkpoint"),
                        (with_header(h1=3), "version 3"), (with_header()[:-4] + nan, "v: NaN"),
                        (good[:-4] + nan, "is damaged"),
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
    assert first["update"]["step"] == shared["update"]["step"] == 1
    assert first["update"]["whose"] == "the trainer's defaults, as this is no run"
    assert shared["update"]["whose"] == "the run's" and shared["update"]["peak"] == 0.01

    state.write_bytes(good)
    notes = json.loads(marker.read_text())
    del notes["optimizer"]  # as of an earlier version
    marker.write_text(json.dumps(notes))
    assert "without the run's settings" in run_here(*command).stderr
