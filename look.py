"""
One training step of your own model as a page: every tensor, forward, backward and update, and how
each number is made; a small model is also trained in the page.

    python look.py runs/first --prompt "The cat sat on the mat."     # look.html, which it opens

The step is the trainer's: its layers run on the prompt, and are watched. The page gets the weights
and the optimizer's moments, rounded to bfloat16 before the step, as a GPU has weights, and who read
and wrote what; it computes all other numbers itself, by the layers' formulas in look/formulas.js.
look/page.js has the pictures.
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import base64
import contextlib
import dataclasses
import functools
import inspect
import json
import re
import sys
import webbrowser
import zlib
from pathlib import Path
from unittest import mock

import numpy as np

from llmc.api import load, pages
from llmc.checkpoint import SeveralRanks, owned_by_one
from llmc.errors import Parser, UserError, run_main
from llmc.files import replacing
from llmc.resume import checkpoint_paths, complete_checkpoints, read_notes, read_state
from llmc.schedulers import learning_rate_at
from llmc.tensors import bf16_bits, bf16_to_float32, flat, table_elements, views

FOLDER = Path(__file__).with_name("look")
MOST_TOKENS, MOST_MB, MOST_FRAMES = 64, 32, 12
MOST_ALIVE, MOST_ROWS = 800_000, 32  # weights of a model that trains in the page; rows of others'
TITLE = b"<title>One training step</title>"  # of page.html, and of the pages of earlier versions
same = functools.partial(np.array_equal, equal_nan=True)


@contextlib.contextmanager
def watching(call):
    """Within the block, the layers' functions, and the optimizers', run as call(function,
    arguments): of all trainers, as they share some."""
    running = []

    def watched(f):
        def run(*args):
            if running:  # called by another layer's function
                return f(*args)
            running.append(f)
            call(f, inspect.signature(f).bind(*args).arguments)
            running.pop()
        return run

    with contextlib.ExitStack() as patches:
        for module in (sys.modules[page.__module__] for page in pages()):
            layers = {name: watched(f) for name, f in vars(module).items()
                      if name.endswith(("_forward", "_backward", "_update"))}
            patches.enter_context(mock.patch.multiple(module, **layers))
        yield


class Numbers(list):
    """The page's numbers: float32 vectors, one after the other."""

    def add(self, x):
        """Any array -> where its numbers begin."""
        self.append(np.array(x, "<f4").ravel())  # a copy: the update changes weights in place
        return sum(map(len, self[:-1]))

    def text(self):
        """All of them, deflated, in base64: the first byte of each, then the second ... of what is
        rounded, two are 0."""
        planes = np.concatenate(self).view(np.uint8).reshape(-1, 4).T
        deflate = zlib.compressobj(strategy=zlib.Z_RLE)  # there is little to find but runs of 0
        return base64.b64encode(deflate.compress(planes.tobytes()) + deflate.flush())


def parts(config, tensors, *others):
    """(name, layer or "", [the part of each]) of Tensors that are alike, without what pads the
    vocabulary."""
    for name, row in tensors.table.items():
        for l in range(row.shape[0]) if row.stacked else ("",):
            part = l if row.stacked else slice(config.V if row.vocabulary else None)
            yield name, l, [getattr(source, name)[part] for source in (tensors, *others)]


def axes_of(model, kind, name):
    """What the axes of a table's tensor count, without layer and batch. Those of positions are the
    ones that grow with the sequences."""
    config, T = model.config, 2
    if kind == "params":
        longer = dataclasses.replace(config, maxT=config.maxT + 1)
        row, grown = (model.parameter_table(c)[name] for c in (config, longer))
        count = len(row.shape) - row.stacked
        if row.vocabulary or row != grown:
            return ["token" if row.vocabulary else "position", "channel"][:count]
        return ["output", "input"] if count == 2 else ["channel"]
    table = model.activation_table if kind == "acts" else model.scratch_table
    row, grown = (table(config, 1, t)[name] for t in (T, T + 1))
    first = row.stacked + 1
    grows = [a != b for a, b in zip(row.shape, grown.shape)][first:]
    words = ["position" if axis == grows.index(True) else "looks at" if grow else
             "head" if axis == 0 else "channel" for axis, grow in enumerate(grows)]
    return words[:-1] + ["token"] if row.shape[-1] == config.V and not grows[-1] else words


class Recorder:
    """The calls of a step, and the tensors that they read and write. A buffer that is written anew
    is a new tensor."""

    def __init__(self, model):
        self.model = model
        self.tensors, self.calls, self.numbers = [], [], Numbers()  # what the page is told
        self.contents, self.arguments = [], []  # of each tensor, of each call
        self.functions, self.params = {}, {}  # name -> function; (name, layer) -> its weight
        self.gradients, self.forward = {}, {}  # tensor -> its gradient; layer -> its calls
        self.newest, self.places = {}, {}  # address -> its newest tensor; kind, name, layer, rows
        self.changes = {}  # address -> forward calls that changed a tensor: [call, before, undone]
        for kind in ("params", "grads", "acts", "scratch"):
            for name, l, (part,) in parts(model.config, getattr(model, kind)):
                self.places[part.ctypes.data] = kind, name, l, len(part)
                if kind == "params":
                    self.params[name, l] = self.add(part, part.copy(), name)

    def place(self, x):
        """(kind, name, layer, rows) of an array, by its address."""
        return self.places.get(x.ctypes.data, ("", "", "", None))

    def copy(self, x):
        return x[: self.place(x)[3]].copy()

    def record(self, f, arguments):
        """Call a layer's function, and note what it reads and writes. What it wrote may have been
        read before, as by `+=`: if its content was known, it is among both."""
        arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
        before = {name: self.copy(x) for name, x in arrays.items()}
        number = len(self.calls)
        f(**arguments)
        changed = {name: content for name, x in arrays.items()
                   if not same(content := self.copy(x), before[name])}
        # gelu_backward's dinp is its dout: the first counts
        written = [*{arrays[name].ctypes.data: name for name in reversed(changed)}.values()][::-1]
        known = {name: n for name, x in arrays.items()
                 if (n := self.newest.get(x.ctypes.data)) is not None
                 and same(self.contents[n], before[name])}
        ins = {name: known[name] if name in known else self.add(x, before[name], name)
               for name, x in arrays.items() if name in known or name not in changed}

        layer, _, direction = f.__name__.rpartition("_")
        outs = {name: self.add(arrays[name], changed[name], name, number) for name in written}
        if direction == "forward":
            self.forward.setdefault(layer, []).append(number)
            for name in outs.keys() & ins.keys():  # in place
                self.changes.setdefault(arrays[name].ctypes.data, []).append(
                    [number, ins[name], False])
                self.tensors[ins[name]]["before"] = layer
        self.calls.append(dict(f=f.__name__, ins=ins, outs=outs, sizes=sizes_of(f, arguments)))
        self.arguments.append((f, arguments))
        self.functions[f.__name__] = f
        if direction == "backward":
            self.label(layer, ins, outs)

    def label(self, layer, ins, outs):
        """Find what a backward call's gradients are of: dX, written, of the X that the forward call
        read; dout, read, of its out."""
        calls = self.forward.get(layer, [])  # the backward pass goes back through them
        call = calls.pop() if calls else None
        forward = dict(ins={}, outs={}) if call is None else self.calls[call]
        for name, number in outs.items():
            of = self.before(call, forward, name[1:])
            fields = self.tensors[number]
            if of is None:
                fields |= dict(kind="gradient", name=f"{name} by {layer}_backward",
                               layer=self.tensors[forward["ins"][name[1:]]]["layer"])
                continue
            fields |= dict(kind="gradient", of=of, **{
                field: self.tensors[of].get(field, "") for field in ("name", "layer", "before")})
            fields["axes"] = self.tensors[of]["axes"]
            if self.gradients.get(of) == ins.get(name, -1):  # there is more of it now
                self.tensors[ins[name]]["before"] = layer
            self.gradients[of] = number
        if "dout" in ins and "out" in forward["outs"]:  # of a sum's terms, too: it hands it on
            self.gradients.setdefault(forward["outs"]["out"], ins["dout"])

    def before(self, call, forward, name):
        """The tensor whose gradient the backward pass now has, in the place of argument `name` of a
        forward call; None if calls that changed it were not undone in reverse order: then it is of
        none."""
        if call is None:  # a backward call for several layers: of what was read last
            read = [c["ins"][name] for c in self.calls if name in c["ins"]]
            return read[-1]
        if name not in forward["ins"]:
            return forward["outs"][name]
        address = self.arguments[call][1][name].ctypes.data
        changes = self.changes.get(address, []) if name in forward["outs"] else []
        for change in changes:
            change[2] |= change[0] == call
        of = forward["ins"][name]
        for number, before, undone in reversed(changes):
            if not undone:
                return None if number > call else of
            of = before
        return of

    def add(self, x, content, argument, by=None):
        """A new tensor, written by call `by`; returns its number."""
        kind, name, l, _ = self.place(x)
        self.newest[x.ctypes.data] = len(self.tensors)
        shape = content.shape[kind in ("acts", "scratch") or content.dtype.kind == "i" :]
        axes = ["position", "channel", "channel"][: len(shape)]
        if kind in ("acts", "scratch", "params") and shape:
            axes = axes_of(self.model, kind, name)
        at = self.numbers.add(content) if by is None else None
        return self.describe(content, name=name or argument, layer=l, kind=kind, by=by,
                             arg=argument, shape=shape, axes=axes, at=at)

    def store_without_formula(self):
        """Give the page the numbers of tensors that it has no formula for; returns how many."""
        formulas, count = (FOLDER / "formulas.js").read_text("utf-8"), 0
        for tensor, content in zip(self.tensors, self.contents):
            if tensor["by"] is not None:
                layer = re.sub("^(layer|rms)", "", self.calls[tensor["by"]]["f"])
                if f'"{layer}.{tensor["arg"]}":' not in formulas:
                    tensor["at"] = self.numbers.add(content)
                    count += 1
        return count

    def describe(self, content, **fields):
        self.tensors.append(fields)
        self.contents.append(content)
        return len(self.tensors) - 1


def sizes_of(f, arguments):
    """The numbers among a function's arguments, and the constants that its source names."""
    text = inspect.getsource(f)
    constants = {name: float(x) for name, x in f.__globals__.items()
                 if isinstance(x, (float, np.float32)) and re.search(rf"\b{name}\b", text)}
    return constants | {name: x for name, x in arguments.items()
                        if isinstance(x, (int, float, tuple))}


def run_settings(model, path):
    """(settings, whose they are, updates made so far) of a run's newest checkpoint, whose moments
    fill the optimizer's; of another model the trainer's defaults, and 0. Prints a note if a run's
    are not known."""
    steps, defaults = complete_checkpoints(path), "the trainer's defaults"
    if not steps:
        return model.Settings(), f"{defaults}, as this is no run", 0
    file, _, marker = checkpoint_paths(path, steps[-1])
    hint = f"to see a first update of its model: python look.py {file}"
    step = steps[-1]
    try:
        read_state(path, step, owned_by_one(model.optimizer), hint)
    except SeveralRanks as error:
        print(f"note: the update shown is a first one: {error}", file=sys.stderr)
        step = 0
    notes = read_notes(path, steps[-1])
    if "optimizer" not in notes:
        print(f"note: {marker}: without the run's settings: the update shown is one with"
              f" {defaults}", file=sys.stderr)
        return model.Settings(), f"{defaults}, as its checkpoint does not say the run's", step
    known = {field.name for field in dataclasses.fields(model.Settings)}
    found = {name: value for name, value in notes["optimizer"].items() if name in known}
    settings = model.Settings(**found, B=notes.get("update_tokens", 1), T=1)
    try:
        settings.check()
    except (UserError, TypeError) as error:
        raise UserError(f"{marker}: {error}; {hint}") from None
    return settings, "the run's", step


def largest(x, count):
    """The indices of each row's largest numbers, from the largest."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :count]


def update(model, path, recorder, alive):
    """Make the optimizer's update by this step's gradients, with the run's settings; the recorder
    gets a call for each tensor. Returns what the page tells of it."""
    settings, whose, step = run_settings(model, path)
    optimizer, made = model.optimizer, []
    for moments in (optimizer.m, optimizer.v):
        flat(moments)[...] = rounded(flat(moments))
    norm, scale = model.norm_and_scale(settings)
    rate = learning_rate_at(settings, max(0, min(step, settings.steps - 1)))
    sources = {"params": model.params, "m": optimizer.m, "v": optimizer.v, "grads": model.grads}
    before = {what: views(x.table, x.buffer.copy()) for what, x in sources.items()}

    def call(f, arguments):
        made.append((f, arguments))
        f(**arguments)

    with watching(call):
        optimizer.update(model.params, model.grads, settings, rate, step + 1, scale)
    recorder.functions |= {f.__name__: f for f, _ in made}
    for name, l, old in parts(model.config, *before.values()):
        new = [getattr(x, name)[() if l == "" else l][: len(old[0])] for x in sources.values()]
        own = [(f, arguments) for f, arguments in made
               if covers(next(iter(arguments.values())), new[0])]
        f, arguments = own[0]
        roles = {argument: what for argument, x in arguments.items() if isinstance(x, np.ndarray)
                 for what, source in sources.items() if covers(source.buffer, x)}
        sizes = sizes_of(f, arguments) | dict(blocks=len(own))
        describe_update(recorder, f, sizes, roles, name, l, dict(zip(sources, old)),
                        dict(zip(sources, new)), alive)
    return dict(whose=whose, step=step + 1, optimizer=type(optimizer).__name__, norm=norm,
                grad_scale=scale, rate=rate, peak=settings.learning_rate,
                grad_clip=settings.grad_clip)


def describe_update(recorder, f, sizes, roles, name, l, old, new, alive):
    """Tell the page of an update of a tensor: the moments before and after, and the move. Of a
    model that is not `alive`, where the rows and columns that have the largest moves cross.
    roles: argument -> params, m, v or grads; old, new: these before and after."""
    move, weight = new["params"] - old["params"], recorder.params[name, l]
    size = np.atleast_2d(np.abs(move))
    whole = [np.sort(largest(size.max(1 - axis), MOST_ROWS)) for axis in range(2)][-move.ndim :]
    fields = dict(layer=l, axes=recorder.tensors[weight]["axes"])
    if not alive:
        fields["whole"] = [x.tolist() for x in whole]

    def describe(x, is_given, **others):
        part = x if alive else x[np.ix_(*whole)]
        at = recorder.numbers.add(part) if is_given else None
        by = None if others["kind"] == "state" and is_given else len(recorder.calls)
        return recorder.describe(part, shape=part.shape, at=at, by=by, **fields, **others)

    ins, outs = {}, {}
    for argument, role in roles.items():
        if role in ("params", "grads"):
            ins[argument] = weight if role == "params" else recorder.gradients[weight]
        else:
            title = f"{argument}({name})"
            ins[argument] = describe(old[role], True, name=title, kind="state", arg=argument)
            outs[argument] = describe(new[role], False, name=f"new {title}", kind="state",
                                      arg=argument)
    outs["move"] = describe(move, not alive, name=name, kind="move", arg="move")
    recorder.calls.append(dict(f=f.__name__, ins=ins, outs=outs, sizes=sizes))


def covers(x, y):
    """Whether two arrays share memory; each is contiguous."""
    return x.ctypes.data < y.ctypes.data + y.nbytes and y.ctypes.data < x.ctypes.data + x.nbytes


def stream_of(recorder):
    """[(name, layer)] of the residual stream: as it begins, and after each layer."""
    sums = [call for call in recorder.calls if call["f"] == "residual_forward"]
    ends = {recorder.tensors[call["outs"]["out"]]["layer"]: call["outs"]["out"] for call in sums}
    return [(recorder.tensors[n]["name"], recorder.tensors[n]["layer"])
            for n in (sums[0]["ins"]["inp1"], *ends.values())]


def film(path, inputs, targets, recorder):
    """The prompt in the checkpoints of a run: loss, guesses, the root mean square of the residual
    stream as it begins and after each layer, and attention, in steps of 1/32."""
    steps, frames = complete_checkpoints(path), []
    chosen = sorted({round(x) for x in np.linspace(0, len(steps) - 1, MOST_FRAMES)})
    attention = next(c["outs"]["att"] for c in recorder.calls if "att" in c["outs"])
    for i in chosen if len(steps) > 1 else ():
        model = load_rounded(checkpoint_paths(path, steps[i])[0])
        loss, acts = model.forward(inputs, targets), model.model.acts
        stream = [getattr(acts, name)[() if l == "" else l] for name, l in stream_of(recorder)]
        att = getattr(acts, recorder.tensors[attention]["name"])
        guesses = [[[int(id), round(float(row[id]), 4)] for id in largest(row, 3)]
                   for row in acts.probs[0]]
        frames.append(dict(
            step=steps[i], loss=loss, losses=acts.losses[0].tolist(), guesses=guesses,
            norms=[float(np.sqrt(np.square(x).mean())) for x in stream],
            att=recorder.numbers.add(np.rint(att * 32) / 32)))
    return frames


def rounded(x):
    """float32 numbers, rounded to bfloat16's."""
    return bf16_to_float32(bf16_bits(x))


def load_rounded(path, **options):
    """llmc.api's Model, its weights rounded to bfloat16."""
    model = load(path, **options)
    weights = flat(model.model.params)
    weights[...] = rounded(weights)
    return model


def longest(recorder, model, T):
    """Store given tensors that grow with the prompt, like RoPE's angles, for `T` tokens, so that
    another prompt can be typed in."""
    given = {(call["f"], name): n for call in recorder.calls for name, n in call["ins"].items()
             if recorder.tensors[n]["at"] is not None and not recorder.tensors[n]["kind"]
             and recorder.contents[n].dtype.kind == "f"}

    def call(f, arguments):
        for name, x in arguments.items():
            if n := given.pop((f.__name__, name), None):
                recorder.tensors[n]["at"] = recorder.numbers.add(x)
        f(**arguments)

    model.allocate_activations(1, T)
    with watching(call):
        model.forward(*np.zeros((2, 1, T), np.int32))


def look(path, prompt, tokenizer=""):
    """(the page's data, for JSON; the Recorder, with its numbers). Raises UserError for a prompt
    that is too short or too long, and for a model that is too large."""
    opened = load_rounded(path, tokenizer=tokenizer)
    if not opened.tokenizer:
        raise UserError(f"{path}: no vocabulary is beside it: pass --tokenizer FILE")
    try:
        ids = opened.ids(prompt)
    except UserError as error:
        raise UserError(f"--prompt: {error}") from None
    T, most, model, config = len(ids) - 1, min(MOST_TOKENS, opened.T), opened.model, opened.config
    if not 2 <= T <= most:
        raise UserError(f"--prompt: {len(ids)} token{'s' * (T != 0)}, expected 3 to {most + 1}")
    size = table_elements(model.params.table)
    megabytes = size * 1.9 / 1e6  # as bfloat16s, deflated, in base64
    if megabytes > MOST_MB:
        raise UserError(f"{path}: the page would have {megabytes:,.0f} MB, of at most {MOST_MB}:"
                        " look at a smaller model, like d4")

    model.allocate_activations(1, T)
    model.allocate_training(1, T)
    model.acts = views(model.activation_table(config, 1, T), model.activations_buffer)
    for tensors in (model.acts, model.scratch):
        flat(tensors).fill(np.nan)  # so that whatever is written differs from it
    recorder, inputs, targets = Recorder(model), ids[None, :-1], ids[None, 1:]
    with watching(recorder.record):
        loss = model.forward(inputs, targets)
        forward = len(recorder.calls)
        model.backward()
    alive = not recorder.store_without_formula() and size <= MOST_ALIVE
    updated = update(model, path, recorder, alive)
    frames = film(path, inputs, targets, recorder)
    longest(recorder, model, most)
    source = {name: dict(text=inspect.getsource(f), line=inspect.getsourcelines(f)[1],
                         file=Path(inspect.getsourcefile(f)).name)
              for name, f in recorder.functions.items()}
    vocabulary = [opened.tokenizer.decode([id]) for id in range(config.V)]
    typed = all(len(word) <= 1 or id in opened.tokenizer.special
                for id, word in enumerate(vocabulary))
    return dict(
        path=path, title=model.TITLE, model=config.describe(), loss=loss,
        ids=ids.tolist(), most=most, alive=alive, calls=recorder.calls, forward=forward,
        gradients=recorder.gradients, source=source, tensors=recorder.tensors, words=model.WORDS,
        vocabulary=vocabulary, typed=typed,
        update=updated, film=frames,
    ), recorder


def check_output(path):
    """Raise UserError if there is something at `path`, and it is not a page of this program's."""
    file = Path(path)
    if file.exists() and not (file.is_file() and TITLE in file.open("rb").read(300)):
        raise UserError(f"-o {path}: is no page of look.py's, and not written over: choose another"
                        " name")


def write_page(path, data, numbers):
    """One file, all ASCII, so that any host serves it: the page, its style, its script, its data,
    in which `<` would end the script, and the numbers. JavaScript (up to U+FFFF) and JSON have an
    escape for other characters."""
    page = "{page.html}"
    for name in ("page.html", "page.css", "formulas.js", "page.js", "views.js"):
        page = page.replace(f"{{{name}}}", (FOLDER / name).read_text("utf-8"))
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = page.replace("{data}", text).encode("ascii", "backslashreplace")
    before, after = page.rsplit(b"{numbers}", 1)
    with replacing(path) as f:
        f.write(before + numbers.text() + after)


def main():
    parser = Parser(description=__doc__.strip().split("\n")[0])
    add = parser.add_argument
    add("model", help="the directory of a run, a .bin file or a Hugging Face folder")
    add("--prompt", default="The cat sat on the mat.", help="its text (default: %(default)s)")
    add("--tokenizer", metavar="FILE", default="", help="a file (default: that beside the model)")
    add("-o", "--output", default="look.html", help="the page to write (default: %(default)s)")
    add("--open", type=int, choices=(0, 1), default=1, help="1: open it in a browser (the default)")
    args = parser.parse_args()
    check_output(args.output)
    data, recorder = look(args.model, args.prompt, args.tokenizer)
    write_page(args.output, data, recorder.numbers)
    megabytes = Path(args.output).stat().st_size / 1e6
    print(f"{args.output}: {megabytes:.1f} MB, loss {data['loss']:.4f}")
    if args.open:
        webbrowser.open(Path(args.output).resolve().as_uri())


if __name__ == "__main__":
    run_main(main)
