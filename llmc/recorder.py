"""
What a training step does, as it runs: each call of a layer's function, the tensors that it reads
and writes, and what each gradient is of.
"""

import base64
import contextlib
import dataclasses
import functools
import inspect
import re
import sys
import zlib
from unittest import mock

import numpy as np

from llmc.api import pages

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
