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

import dataclasses
import inspect
import json
import re
import sys
import webbrowser
from pathlib import Path

import numpy as np

from llmc.api import load
from llmc.chat import NotPrefixes, Template
from llmc.checkpoint import SeveralRanks, owned_by_one
from llmc.errors import Parser, UserError, run_main
from llmc.files import replacing
from llmc.recorder import Recorder, parts, sizes_of, watching
from llmc.resume import checkpoint_paths, complete_checkpoints, read_notes, read_state
from llmc.schedulers import learning_rate_at
from llmc.tensors import bf16_bits, bf16_to_float32, flat, table_elements, views

FOLDER = Path(__file__).with_name("look")
MOST_TOKENS, MOST_MB, MOST_FRAMES = 64, 32, 12
MOST_ALIVE, MOST_ROWS = 800_000, 32  # weights of a model that trains in the page; rows of others'
TITLE = b"<title>One training step</title>"  # of page.html, and of the pages of earlier versions


def store_without_formula(recorder):
    """Give the page the numbers of tensors that it has no formula for; returns how many."""
    formulas, count = (FOLDER / "formulas.js").read_text("utf-8"), 0
    for tensor, content in zip(recorder.tensors, recorder.contents):
        if tensor["by"] is not None:
            layer = re.sub("^(layer|rms)", "", recorder.calls[tensor["by"]]["f"])
            if f'"{layer}.{tensor["arg"]}":' not in formulas:
                tensor["at"] = recorder.numbers.add(content)
                count += 1
    return count


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


def film(path, inputs, targets, weights, recorder):
    """The prompt in the checkpoints of a run: loss, guesses, the root mean square of the residual
    stream as it begins and after each layer, and attention, in steps of 1/32."""
    steps, frames = complete_checkpoints(path), []
    chosen = sorted({round(x) for x in np.linspace(0, len(steps) - 1, MOST_FRAMES)})
    attention = next(c["outs"]["att"] for c in recorder.calls if "att" in c["outs"])
    for i in chosen if len(steps) > 1 else ():
        model = load_rounded(checkpoint_paths(path, steps[i])[0])
        loss, acts = model.forward(inputs, targets, weights), model.model.acts
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


def tokens_of(opened, path, prompt, answer):
    """(ids (n,), the weights of all but the first as targets (1,n-1), or None) of a prompt or, with
    an answer to it, of a chat: then what the assistant says counts."""
    if not answer:
        try:
            return opened.ids(prompt), None
        except UserError as error:
            raise UserError(f"--prompt: {error}") from None
    template = Template(opened.tokenizer, path, "--answer")
    try:
        ids, weights, ends = template.tokens([{"role": "user", "content": prompt},
                                              {"role": "assistant", "content": answer}])
        end = ends[-1]
    except (NotPrefixes, IndexError):
        raise UserError("--answer: the chat template does not show where an answer"
                        " begins") from None
    return np.array(ids[:end], np.int32), np.array([weights[1:end]], np.float32)


def look(path, prompt, tokenizer="", answer=""):
    """(the page's data, for JSON; the Recorder, with its numbers). Raises UserError for a prompt
    that is too short or too long, and for a model that is too large."""
    opened = load_rounded(path, tokenizer=tokenizer)
    if not opened.tokenizer:
        raise UserError(f"{path}: no vocabulary is beside it: pass --tokenizer FILE")
    ids, weights = tokens_of(opened, path, prompt, answer)
    T, most, model, config = len(ids) - 1, min(MOST_TOKENS, opened.T), opened.model, opened.config
    if not 2 <= T <= most:
        flag = "--prompt and --answer, in the chat template" if answer else "--prompt"
        raise UserError(f"{flag}: {len(ids)} token{'s' * (T != 0)}, expected 3 to {most + 1}")
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
        loss = model.forward(inputs, targets, weights)
        forward = len(recorder.calls)
        model.backward()
    alive = not store_without_formula(recorder) and size <= MOST_ALIVE
    updated = update(model, path, recorder, alive)
    frames = film(path, inputs, targets, weights, recorder)
    longest(recorder, model, most)
    source = {name: dict(text=inspect.getsource(f), line=inspect.getsourcelines(f)[1],
                         file=Path(inspect.getsourcefile(f)).name)
              for name, f in recorder.functions.items()}
    vocabulary = [opened.tokenizer.decode([id]) for id in range(config.V)]
    typed = all(len(word) <= 1 or id in opened.tokenizer.special
                for id, word in enumerate(vocabulary))
    return dict(
        path=path, title=model.TITLE, model=config.describe(), loss=loss,
        ids=ids.tolist(), weights=None if weights is None else weights[0].tolist(), most=most,
        alive=alive, calls=recorder.calls, forward=forward, gradients=recorder.gradients,
        source=source, tensors=recorder.tensors, words=model.WORDS,
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
    for name in ("page.html", "page.css", "numbers.js", "formulas.js", "page.js", "alive.js",
                 "views.js"):
        page = page.replace(f"{{{name}}}", (FOLDER / name).read_text("utf-8"))
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = page.replace("{data}", text).encode("ascii", "backslashreplace")
    before, after = page.rsplit(b"{numbers}", 1)
    with replacing(path) as f:
        f.write(before + numbers.text() + after)


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("model", help="the directory of a run, a .bin file or a Hugging Face folder")
    add("--prompt", default="The cat sat on the mat.", help="its text (default: %(default)s)")
    add("--answer", metavar="TEXT", default="", help="what a model should answer to the prompt in a"
        " chat: the loss is of these tokens alone, as in training on chats")
    add("--tokenizer", metavar="FILE", default="", help="a file (default: that beside the model)")
    add("-o", "--output", default="look.html", help="the page to write (default: %(default)s)")
    add("--open", type=int, choices=(0, 1), default=1, help="1: open it in a browser")
    args = parser.parse_args()
    check_output(args.output)
    data, recorder = look(args.model, args.prompt, args.tokenizer, args.answer)
    write_page(args.output, data, recorder.numbers)
    megabytes = Path(args.output).stat().st_size / 1e6
    print(f"{args.output}: {megabytes:.1f} MB, loss {data['loss']:.4f}")
    if args.open:
        webbrowser.open(Path(args.output).resolve().as_uri())


if __name__ == "__main__":
    run_main(main)
