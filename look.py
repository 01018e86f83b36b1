"""
One training step of your own model as a page: every tensor, forward, backward and update, and how
each number is made.

    python look.py runs/first --prompt "The cat sat on the mat."     # writes look.html, and opens it

The step is the trainer's: the layers of train_gpt2.py or train_llama3.py run on the prompt, and are
watched. The page gets the weights, rounded to bfloat16 before the step, as a GPU has them, and who
read and wrote what; it computes all other numbers itself. look/formulas.js has each layer's formula
for a single number, look/page.js the pictures.
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import contextlib
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
from llmc.resume import checkpoint_paths, complete_checkpoints, read_state
from llmc.tensors import bf16_bits, bf16_to_float32, flat, table_elements, views

FOLDER = Path(__file__).with_name("look")
MOST_TOKENS = 64
MOST_MB = 32
MOST_FRAMES = 12
MOST_ROWS = 32
UPDATES = ("adamw_update", "muon_update")
same = functools.partial(np.array_equal, equal_nan=True)


@contextlib.contextmanager
def watching(call):
    """Within the block, the layers' functions run as call(function, arguments): of all trainers, as
    they share some."""
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
                      if name.endswith(("_forward", "_backward"))}
            patches.enter_context(mock.patch.multiple(module, **layers))
        yield


class Numbers(list):
    """The page's numbers: float32 vectors, one after the other."""

    def add(self, x):
        """Any array -> where its numbers begin."""
        self.append(np.array(x, "<f4").ravel())  # a copy: the update changes weights in place
        return sum(map(len, self[:-1]))

    def text(self):
        """All of them, deflated: the first byte of each, then the second ... of weights, two are 0.
        Each byte is a character of windows-1252, but after `=` its bit 6 is inverted: HTML alters
        NUL and CR, and ends at `<`."""
        planes = np.concatenate(self).view(np.uint8).reshape(-1, 4).T
        deflate = zlib.compressobj(strategy=zlib.Z_RLE)  # there is little to find but runs of 0
        packed = deflate.compress(planes.tobytes()) + deflate.flush()
        return re.sub(rb"[\0\r<=]", lambda found: b"=%c" % (found[0][0] ^ 64), packed)


def parts(config, tensors, *others):
    """(name, layer or "", [the part of each]) of Tensors that are alike, without what pads the
    vocabulary."""
    for name, row in tensors.table.items():
        for l in range(row.shape[0]) if row.stacked else ("",):
            part = l if row.stacked else slice(config.V if row.vocabulary else None)
            yield name, l, [getattr(source, name)[part] for source in (tensors, *others)]


class Recorder:
    """The calls of a step, and the tensors that they read and write. A buffer that is written anew
    is a new tensor."""

    def __init__(self, model):
        self.tensors = []
        self.calls = []
        self.numbers = Numbers()  # what the page is told
        self.contents = []
        self.arguments = []  # of each tensor, of each call
        # "name|layer" -> its gradient's number; layer -> arrays of its calls
        self.gradients, self.forward = {}, {}
        # address -> the number of its newest tensor; kind, name, layer, rows
        self.newest, self.places = {}, {}
        for kind in ("params", "grads", "acts", "scratch"):
            for name, l, (part,) in parts(model.config, getattr(model, kind)):
                self.places[part.ctypes.data] = kind, name, l, len(part)
                if kind == "params":
                    self.add(part, part.copy(), name)

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
        calls = self.forward.setdefault(layer, [])
        of = {}  # gradient -> (name, layer)
        if direction == "forward":
            calls.append(arrays)
        else:  # the backward pass goes back through the forward calls
            forward = calls.pop() if calls else {}
            of = {name: self.place(forward[name[1:]])[1:3] if name[1:] in forward
                  else (name[1:], "")
                  for name in written}
            # of a sum's terms, to which the sum's gradient is handed on
            if "dout" in ins and forward:
                self.gradients.setdefault("{1}|{2}".format(*self.place(forward["out"])),
                                          ins["dout"])
        outs = {name: self.add(arrays[name], changed[name], name, number, of.get(name))
                for name in written}
        sizes = {name: x for name, x in arguments.items() if isinstance(x, (int, float))}
        self.calls.append(dict(f=f.__name__, ins=ins, outs=outs, sizes=sizes))
        self.arguments.append((f, arguments))

    def add(self, x, content, argument, by=None, of=None):
        """A new tensor, written by call `by`, the gradient `of` (name, layer) or itself; returns
        its number."""
        kind, name, l, _ = self.place(x)
        # of a batch of one
        shape = content.shape[kind in ("acts", "scratch") or content.dtype.kind == "i" :]
        self.newest[x.ctypes.data] = len(self.tensors)
        if of:
            kind, name, l = "gradient", *of
            self.gradients[f"{name}|{l}"] = len(self.tensors)
        return self.describe(content, name=name or argument, layer=l, kind=kind, by=by,
                             arg=argument, shape=shape,
                             at=self.numbers.add(content) if by is None else None)

    def describe(self, content, **fields):
        self.tensors.append(fields)
        self.contents.append(content)
        return len(self.tensors) - 1


def largest(x, count):
    """The indices of each row's largest numbers, from the largest."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :count]


def best(probs, count):
    """[[id, probability] * count] of each row, the likeliest first."""
    return [[[int(id), round(float(row[id]), 4)] for id in ids]
            for ids, row in zip(largest(probs, count), probs)]


def guesses_after_layers(model, calls):
    """The five likeliest next tokens at each position by the residual stream after each layer
    (layer 0: embedding), as if no layer followed: [layer][position] -> [id, probability]s. This is
    the logit lens, nostalgebraist 2020."""
    acts = model.acts
    last = model.acts.residual3[-1]
    found = []
    reads = [arguments["inp"].ctypes.data if "inp" in arguments else 0 for _, arguments in calls]
    for residual in (acts.encoded.copy(), *acts.residual3.copy()):
        last[...] = residual
        for f, arguments in calls[reads.index(last.ctypes.data) :]:
            f(**arguments)
        found.append(best(acts.probs[0], 5))
    return found


def gradient_times_input(model, T):
    """(T, T): how much the loss at position t (row) depends on the token at t2: the gradient with
    respect to its embedding, as the first layer reads it, times that. (A speed run's is normalized
    before: of what is looked up, the length has no effect.)"""
    depends = []
    activations = model.acts.buffer.copy()
    embedded = model.acts.encoded[0].copy()

    def call(f, arguments):
        if f.__name__ == "crossentropy_softmax_backward":
            arguments["dlosses"][...] = np.arange(T) == len(depends)
        if f.__name__ == "encoder_backward":
            depends.append(np.vecdot(model.scratch.dresidual[0], embedded))
        f(**arguments)

    with watching(call):
        for _ in range(T):
            model.backward()
            model.acts.buffer[...] = activations  # a speed run's backward pass overwrites some
    return np.array(depends)


def read_moments(path, optimizer):
    """Fill the optimizer's moments from a run's newest checkpoint, and return how many updates made
    them: 0 if there is none, or if each of several GPUs has a share. Raises UserError for a state
    that is damaged, or another model's."""
    steps = complete_checkpoints(path)
    if not steps:
        return 0
    model, *_ = checkpoint_paths(path, steps[-1])
    hint = f"to see a first update of its model: python look.py {model}"
    try:
        progress, _ = read_state(path, steps[-1], owned_by_one(optimizer), hint)
    except SeveralRanks as error:
        print(f"note: the update shown is a first one: {error}", file=sys.stderr)
        return 0
    return progress.step


def update(model, step, settings, recorder):
    """The optimizer's update by this step's gradients, after `step` others, a call for each tensor.
    What it writes, for the page, is how far it moves weights: of a matrix, where the rows and
    columns that have the largest moves cross."""
    optimizer = model.optimizer
    add = recorder.numbers.add
    table = model.params.table
    moved = views(model.params.table, model.params.buffer.copy())
    optimizer.update(model.params, model.grads, settings, settings.learning_rate, step + 1)
    np.subtract(flat(model.params), flat(moved), out=flat(moved))
    for name, l, found in parts(model.config, moved, optimizer.m, optimizer.v):
        size = np.atleast_2d(np.abs(found[0]))
        whole = [np.sort(largest(size.max(1 - axis), MOST_ROWS))
                 for axis in range(2)][-found[0].ndim :]
        move, m, v = (x[np.ix_(*whole)] for x in found)
        number = recorder.describe(move, name=name, layer=l, kind="move", by=len(recorder.calls),
                                   arg="move",
                                   at=add(move), shape=move.shape,
                                   whole=[x.tolist() for x in whole])
        sizes = dict(rate=settings.learning_rate * table[name].rate, m=add(m), v=add(v))
        f = UPDATES[table[name].matrices > 0]
        recorder.calls.append(dict(f=f, ins={}, outs=dict(move=number), sizes=sizes))
    lengths = np.linalg.norm(moved.wte, axis=1)
    decay = settings.weight_decay * table["wte"].decay if settings.decay == "all" else 0.0
    return dict({name: getattr(settings, name)
                 for name in ("learning_rate", "beta1", "beta2", "eps")}, step=step + 1,
                weight_decay=decay, optimizer=type(optimizer).__name__,
                embeddings=[[int(id), float(lengths[id])] for id in largest(lengths, 12)])


def film(path, inputs, targets, numbers):
    """The prompt in the checkpoints of a run: loss, guesses, the root mean square of the residual
    stream after each layer (layer 0: embedding), and attention, in steps of 1/32."""
    steps = complete_checkpoints(path)
    frames = []
    for i in sorted({round(x)
                     for x in np.linspace(0, len(steps) - 1,
                                          MOST_FRAMES)}) if len(steps) > 1 else ():
        model = load_rounded(checkpoint_paths(path, steps[i])[0])
        loss = model.forward(inputs, targets)
        acts = model.model.acts
        norms = [float(np.sqrt(np.square(x).mean())) for x in (acts.encoded, *acts.residual3)]
        frames.append(dict(step=steps[i], loss=loss, losses=acts.losses[0].tolist(),
                           guesses=best(acts.probs[0], 3),
                           norms=norms, att=numbers.add(np.rint(acts.att * 32) / 32)))
    return frames


def load_rounded(path, **options):
    """llmc.api's Model, its weights rounded to bfloat16."""
    model = load(path, **options)
    weights = flat(model.model.params)
    weights[...] = bf16_to_float32(bf16_bits(weights))
    return model


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
    T = len(ids) - 1
    most = min(MOST_TOKENS, opened.T)
    model = opened.model
    config = opened.config
    if not 2 <= T <= most:
        raise UserError(f"--prompt: {len(ids)} token{'s' * (T != 0)}, expected 3 to {most + 1}")
    megabytes = table_elements(model.params.table) * 1.4 / 1e6  # as bfloat16s, deflated
    if megabytes > MOST_MB:
        raise UserError(f"{path}: the page would have {megabytes:,.0f} MB, of at most {MOST_MB}:"
                        " look at a smaller model, like d4")
    model.allocate_activations(1, T)
    model.allocate_training(1, T)
    step = read_moments(path, model.optimizer)
    model.acts = views(model.activation_table(config, 1, T), model.activations_buffer)
    for tensors in (model.acts, model.scratch):
        flat(tensors).fill(np.nan)  # so that whatever is written differs from it
    recorder = Recorder(model)
    inputs = ids[None, :-1]
    targets = ids[None, 1:]
    with watching(recorder.record):
        loss = model.forward(inputs, targets)
    forward = len(recorder.calls)
    losses = model.acts.losses[0].tolist()
    guesses = guesses_after_layers(model, recorder.arguments)
    depends = gradient_times_input(model, T)
    with watching(recorder.record):
        model.backward()
    optimizer = vars(sys.modules[type(model.optimizer).__module__])
    functions = ([f for f, _ in recorder.arguments]
                 + [optimizer[name] for name in UPDATES if name in optimizer])
    source = {f.__name__: dict(text=inspect.getsource(f), line=inspect.getsourcelines(f)[1],
                               file=Path(inspect.getsourcefile(f)).name) for f in functions}
    words = [opened.tokenizer.decode([id]) for id in range(config.V)]
    numbers = recorder.numbers
    return dict(
        path=path, title=model.TITLE, model=config.describe(), loss=loss, losses=losses,
        ids=ids.tolist(),
        L=config.L, NH=config.NH, calls=recorder.calls, forward=forward,
        gradients=recorder.gradients, source=source,
        tensors=recorder.tensors, guesses=guesses, depends=numbers.add(depends), vocabulary=words,
        update=update(model, step, model.Settings(), recorder),
        film=film(path, inputs, targets, numbers),
    ), recorder


def check_output(path):
    """Raise UserError if there is something at `path`, and it is not a page of this program's."""
    file = Path(path)
    begin = (FOLDER / "page.html").read_bytes().partition(b"{")[0]
    if file.exists() and not (file.is_file() and file.open("rb").read(len(begin)) == begin):
        raise UserError(f"-o {path}: is no page of look.py's, and not written over: choose another"
                        " name")


def write_page(path, data, numbers):
    """One file: the page, its style, its script, its data, in which `<` would end the script, and
    the numbers. All else is ASCII: page.html and page.css are, and JavaScript (up to U+FFFF) and
    JSON have an escape for other characters."""
    page = "{page.html}"
    for name in ("page.html", "page.css", "formulas.js", "page.js"):
        page = page.replace(f"{{{name}}}", (FOLDER / name).read_text("utf-8"))
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    before, after = page.replace("{data}", text).encode("ascii",
                                                        "backslashreplace").rsplit(b"{numbers}", 1)
    with replacing(path) as f:
        f.write(before + numbers.text() + after)


def main():
    parser = Parser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("model",
                        help="the directory of a run, a .bin file or a Hugging Face folder")
    parser.add_argument("--prompt", default="The cat sat on the mat.",
                        help="the step's text (default: %(default)s)")
    parser.add_argument("--tokenizer", metavar="FILE", default="",
                        help="tokenizer file (default: beside the model)")
    parser.add_argument("-o", "--output", default="look.html",
                        help="the page to write (default: %(default)s)")
    parser.add_argument("--open", type=int, choices=(0, 1), default=1,
                        help="1: open it in a browser (the default)")
    args = parser.parse_args()
    check_output(args.output)
    data, recorder = look(args.model, args.prompt, args.tokenizer)
    write_page(args.output, data, recorder.numbers)
    print(f"{args.output}: {Path(args.output).stat().st_size / 1e6:.1f} MB, loss {data['loss']:.4f}")
    if args.open:
        webbrowser.open(Path(args.output).resolve().as_uri())


if __name__ == "__main__":
    run_main(main)
