"""Matrix multiplication on the GPU: by cuBLASLt or by our kernels, and the search for the fastest way at each shape.

The caller passes all ways to do a matmul, by name; `Matmul.run` picks one. Names that begin with "kernels" stand for
our kernels, the others for cuBLASLt. The choice goes to the cache, for the next start, and to checkpoints, because
another way adds up in another order.
"""

import contextlib
import functools
import json
from types import SimpleNamespace

import numpy as np

from llmc.gpu.compiler import kernel_key
from llmc.gpu.device import GPU_ERRORS, cp, measure
from llmc.errors import UserError
from llmc.gpu.geometry import LONGEST_CHAIN, blocks

ALIGN = 256  # bytes, of tensors; cuBLASLt's fastest algorithms ask for it
WORKSPACE = 32 << 20  # bytes, as cuBLAS recommends for Hopper


class Matmul:
    """Picks the fastest way to do each matmul of a run, out of those of `kernels` and `cublaslt` (None: not used).

    While `searching`, the first call of each shape times its ways, on the data at hand. Shapes that first come later,
    in sampling, take the first way.
    """

    def __init__(self, device, cache, precision, libraries):
        """precision: what operands are rounded to (`matmul`: bf16, tf32 or float32) and the dtype of weight gradients
        (`grads`). libraries: which of "kernels" and "cublaslt" to use."""
        self.device, self.cache, self.precision = device, cache, precision
        self.workspace = None  # see allocate
        self.kernels = MatmulKernels(self) if "kernels" in libraries else None
        self.cublaslt = CublasLt(self) if "cublaslt" in libraries else None
        names = [f"cuBLASLt {self.cublaslt.version}"] if self.cublaslt else []
        names += ["our kernels"] if self.kernels else []
        self.identity = f"{device.gpu.name}, {device.gpu.arch}, {' and '.join(names)}"
        self.searching = False
        self.searched = 0  # shapes that had to be timed
        self.recorded = {}  # key -> choice, from a checkpoint
        self.known = {}  # key -> choice, from the cache or a checkpoint
        self.chosen = {}  # key -> choice of this run
        self.used = set()  # keys called since the search

    def allocate(self):
        """Allocate the workspaces, one for the main stream, one for the side stream."""
        self.workspace = cp.empty((2, WORKSPACE), np.uint8)

    def stream_workspace(self):
        """The workspace of the current stream."""
        return self.workspace[int(self.device.stream is self.device.side)]

    def run(self, key, ways, to=""):
        """Do a matmul by the fastest of `ways`, {name: call}, for the shape that `key` names."""
        ways = {name: call for name, call in ways.items() if self.has(name)}
        name = next(iter(ways))
        if len(ways) > 1:
            key = f"{key} {self.precision.matmul}{to}"
            if self.searching and key not in self.chosen:
                known = self.known.get(key)
                if known not in ways:
                    known = list(ways)[fastest(self.device, list(ways.values()))]
                    self.searched += 1
                self.chosen[key] = known
            if not self.searching:
                self.used.add(key)
            name = self.chosen.get(key, name)
        ways[name]()

    def has(self, name):
        if name.startswith("kernels"):
            return self.kernels and (self.kernels.hopper or not name.endswith("narrow"))
        return self.cublaslt

    # -- what earlier starts and checkpoints know

    def cache_key(self):
        """What cached choices depend on, as text: GPU, libraries, kernels, and how they were timed."""
        files = ("hopper/matmul", "matmul", "gelu", "transpose")
        numbers = {name: n for name, n in vars(self.device.geometry).items()
                   if name.startswith(("MATMUL", "GELU", "TRANSPOSE"))}
        kernels = (kernel_key(name, self.device.gpu.arch, numbers) for name in files)
        return "\n".join([f"algorithms, timed without launching, {self.identity}", *kernels])

    @contextlib.contextmanager
    def search(self, alone=True):
        """Context manager: inside it, matmuls that neither the cache nor a checkpoint knows are timed; then they go to
        the cache. Processes take turns, because two at a time would disturb each other and choose differently.
        alone=False, without waiting, is for a process that has another rank's choices."""
        notice = "another process searches for the fastest matmuls: this one waits for it"
        with self.cache.exclusive("searching", notice) if alone else contextlib.nullcontext():
            found = self.cache.find(self.cache_key(), ".json")
            cached = json.loads(found[1]) if found else {}
            self.known = {**cached, **self.known}
            self.searching = self.device.one_stream = True
            try:
                yield
            finally:
                self.searching = self.device.one_stream = False
            # not a checkpoint's choices, which may be from another machine, or of older kernels
            new = {key: choice for key, choice in self.chosen.items()
                   if choice not in (cached.get(key), self.recorded.get(key))}
            if new:
                self.cache.keep(self.cache_key(), ".json", json.dumps({**cached, **new}, indent=1).encode())

    def notes(self):
        """What a checkpoint records: the same whether this start searched or read the cache."""
        return self.choices(self.used & self.chosen.keys())

    def choices(self, keys=None):
        """The choices of these keys, or all so far, for `recall`."""
        algorithms = {key: self.chosen[key] for key in sorted(self.chosen if keys is None else keys)}
        return {"products": {"on": self.identity, "algorithms": algorithms}}

    @staticmethod
    def identity_in(notes):
        """The `identity` of the run that made these notes; None if they have no choices."""
        return notes.get("products", {}).get("on")

    def recall(self, notes):
        """Use the choices in `notes`; returns False if they are of another GPU or library. Damaged notes raise one of
        the errors that notes_of of resume.py catches."""
        if self.identity_in(notes) != self.identity:
            return False
        recorded = notes["products"]["algorithms"]
        for value in recorded.values():
            if not isinstance(value, str) and np.array(value, np.uint64).shape != (8,):
                raise ValueError("no cublasLtMatmulAlgo_t")
        self.recorded = recorded
        self.known = {**self.known, **self.recorded}
        return True

    def repeats(self):
        """Whether every recorded matmul that occurs in this run is done as the checkpoint says."""
        return all(self.chosen.get(key, value) == value for key, value in self.recorded.items())


RESOLUTION = 0.5e-6  # seconds, of CUDA's events
IN_FRONT = 1.15  # times the least time: ways that took longer at first are not timed again


def fastest(device, calls):
    """Return the index of the fastest call; 0 if no other is measurably faster.

    Those in front are timed again, in turns: as the GPU warms up, its clock falls and matmuls slow down, by up to 15
    percent.
    """
    times = [measure(device, call, 1) for call in calls]
    front = {0, *sorted(range(len(calls)), key=times.__getitem__)[:6]}
    front = [i for i in sorted(front) if times[i] <= IN_FRONT * min(times) + RESOLUTION]
    if len(front) == 1:
        return front[0]
    rounds = 7 if min(times) < 2e-3 else 3
    medians = np.median([[measure(device, calls[i], 1) for i in front] for _ in range(rounds)], axis=0)
    return front[0 if medians[0] <= medians.min() + RESOLUTION else int(np.argmin(medians))]


# ----------------------------------------------------------------------------------------------------------------------
# our kernels


class MatmulKernels:
    """The kernels of hopper/matmul.cu or matmul.cu. Operands and results are row-major, two-dimensional."""

    def __init__(self, matmul):
        self.matmul, self.device, self.geometry = matmul, matmul.device, matmul.device.geometry
        self.hopper = hasattr(self.geometry, "MATMUL_NARROW_BN")
        tiles = WORKSPACE // (4 * self.geometry.MATMUL_BM * self.geometry.MATMUL_BN)  # whose sums the workspace holds
        self.done = cp.zeros((2, tiles), np.int32)  # for each stream: parts of a tile added up so far; 0 after the last

    def forward(self, out, inp, weight, bias, narrow=False):
        """out (N,OC) = inp (N,C) @ weight (OC,C)^T + bias (OC,) (None: no bias). narrow: in tiles of fewer columns."""
        g, name = self.geometry, "matmul_forward_narrow" if narrow else "matmul_forward"
        columns = g.MATMUL_NARROW_BN if narrow else g.MATMUL_BN
        self.launch(name, *out.shape, inp.shape[1], self.result(out, narrow), self.operand(inp, g.MATMUL_BM),
                    self.operand(weight, columns), bias)

    def gelu_forward(self, out, gelu, inp, weight, bias):
        """The same, and gelu (N,OC) = GELU(out)."""
        g = self.geometry
        self.launch("matmul_forward_gelu", *out.shape, inp.shape[1], self.result(out), self.result(gelu),
                    self.operand(inp, g.MATMUL_BM), self.operand(weight, g.MATMUL_BN), bias)

    def backward_inp(self, dinp, dout, weight, scale, narrow=False):
        """dinp (N,C) = scale * dout (N,OC) @ weight (OC,C)."""
        g, name = self.geometry, "matmul_backward_inp_narrow" if narrow else "matmul_backward_inp"
        self.launch(name, *dinp.shape, dout.shape[1], self.result(dinp, narrow), self.operand(dout, g.MATMUL_BM),
                    self.operand(weight, g.MATMUL_BK), float(scale))

    def gelu_backward_inp(self, dinp, partials, dout, weight, inp):
        """dinp (N,C) = dout (N,OC) @ weight (OC,C) * GELU'(inp); partials (tiles, C) = dinp's sums over tiles' rows."""
        g = self.geometry
        self.launch("matmul_backward_inp_gelu", *dinp.shape, dout.shape[1], self.result(dinp), partials,
                    self.operand(dout, g.MATMUL_BM), self.operand(weight, g.MATMUL_BK), self.result(inp))

    def backward_weight_ways(self, dweight, dout, inp, scale):
        """Return the ways to do dweight (OC,C) = scale * dout (N,OC)^T @ inp (N,C): if there are few tiles for the
        multiprocessors, with the inner dimension split into parts (split-K); on Hopper, in narrow tiles, too."""
        g, (OC, C), N = self.geometry, dweight.shape, inp.shape[0]

        def call(name, splits):
            done = self.done[int(self.device.stream is self.device.side)]
            self.launch(name, OC, C, N, self.result(dweight, narrow=True), self.matmul.stream_workspace(), done,
                        self.operand(dout, g.MATMUL_BK), self.operand(inp, g.MATMUL_BK), float(scale), splits=splits)

        room, row_tiles = self.done.shape[1], blocks(OC, g.MATMUL_BM)
        few = row_tiles * blocks(C, g.MATMUL_BN) <= min(2 * self.device.sm_count, room)
        parts = [splits for splits in (1, 2, 3, 4, 5, 7, 9, 11) if splits == 1 or few and N >= 256 * splits]
        ways = {f"kernels {splits}": functools.partial(call, "matmul_backward_weight", splits) for splits in parts}
        if self.hopper:
            fits = row_tiles * blocks(C, g.MATMUL_NARROW_BN) <= room
            ways |= {f"kernels {splits} narrow": functools.partial(call, "matmul_backward_weight_narrow", splits)
                     for splits in parts if splits == 1 or splits < 5 and fits}
        return ways

    def operand(self, array, rows, columns=None):
        """An operand as the kernels take it. rows, columns (None: BK): of the box that TMA copies at once."""
        return self.device.tensor_map(array, rows, columns or self.geometry.MATMUL_BK) if self.hopper else array

    def result(self, array, narrow=False):
        """A result, or an operand of its shape, as the kernels take it: TMA copies a strip of a tile at once."""
        g = self.geometry
        columns = (g.MATMUL_NARROW_STRIP if narrow else g.MATMUL_STRIP) if self.hopper else None
        return self.operand(array, g.MATMUL_BM, columns)

    def launch(self, name, M, N, K, *arguments, splits=1):
        g = self.geometry
        columns = g.MATMUL_NARROW_BN if name.endswith("_narrow") else g.MATMUL_BN
        tiles = blocks(M, g.MATMUL_BM) * blocks(N, columns)
        band = 32 if blocks(N, columns) > 64 else 8  # rows of tiles done together, to share operands in L2
        grid = min(tiles * splits, self.device.sm_count) if self.hopper else tiles * splits
        threads = g.MATMUL_GELU_THREADS if name == "matmul_forward_gelu" else g.MATMUL_THREADS
        sizes = (M, N, K, band, splits) if "weight" in name else (M, N, K, band)
        self.device.launch(name, (grid,), (threads,), *arguments, *sizes)


# ----------------------------------------------------------------------------------------------------------------------
# cuBLASLt

CANDIDATES = 32  # algorithms that a search times
# Tensor cores truncate each addend to the last bit of the sum. With 50304 TF32 products in one chain, as in the
# gradient of lnf, the losses show it. So in the gradients of inputs, a chain has at most LONGEST_CHAIN products, if K
# can be halved that often, and chains are added up in float32: dev/matmul.md. Other matmuls have one chain: there, the
# losses hardly show it. (A bfloat16 result hides the error.)
FLOAT32, BFLOAT16, COMPUTE_FLOAT32, COMPUTE_TF32 = 0, 14, 68, 77  # cudaDataType_t, cublasComputeType_t

cublasLt = None  # nvmath's bindings, imported by the first CublasLt


class CublasLt:
    """Matmuls by the fastest of the algorithms that cuBLASLt proposes."""

    def __init__(self, matmul):
        global cublasLt
        self.matmul, self.device, self.precision = matmul, matmul.device, matmul.precision
        try:
            from nvmath.bindings import cublasLt  # here: it takes 0.3 s, and text generation does not need it

            GPU_ERRORS.add(cublasLt.cuBLASLtError)
            self.handle, self.version = cublasLt.create(), cublasLt.get_version()
        except (ImportError, RuntimeError) as error:
            raise UserError(f"cuBLASLt cannot be loaded ({str(error).splitlines()[0]}): pip install"
                            " -r requirements-gpu.txt nvidia-cublas") from None
        self.plans = {}

    def multiply(self, out, a, b, bias=None, accumulate=False, scale=1.0):
        """out (M,N) = (+=) scale * a (M,K) @ b (K,N) + bias (N,). Arrays are row-major; a and b may be transposed."""
        plan = self.plan(out, a, b, bias)
        scale, beta = np.full(1, scale, np.float32), np.full(1, accumulate, np.float32)

        def run(algorithm):
            cublasLt.matmul(self.handle, plan.description, scale.ctypes.data, b.data.ptr, plan.b, a.data.ptr, plan.a,
                            beta.ctypes.data, out.data.ptr, plan.out, out.data.ptr, plan.out, algorithm.ctypes.data,
                            self.matmul.stream_workspace().data.ptr, WORKSPACE, self.device.stream.ptr)

        if bias is not None:
            set_attribute(plan.description, cublasLt.MatmulDescAttribute.BIAS_POINTER, bias.data.ptr)
        if plan.algorithm is None:
            plan.algorithm = self.choose(plan, run)
        if not self.matmul.searching:
            self.matmul.used.add(plan.key)
        with self.device.observe("cublaslt", (out, a, b)):
            run(plan.algorithm)

    def multiply_in_chains(self, out, a, b, scale=1.0):
        """out (M,N) = scale * a (M,K) @ b (K,N), with at most LONGEST_CHAIN TF32 products in one sum, if K allows."""
        K, parts = b.shape[0], 1
        limited = self.precision.matmul == "tf32"
        while limited and K > parts * LONGEST_CHAIN and K % (8 * parts) == 0:  # rows of a part: multiples of 16 bytes
            parts *= 2
        length = K // parts
        for begin in range(0, K, length):
            part = slice(begin, begin + length)
            self.multiply(out, a[:, part], b[part], accumulate=begin > 0, scale=scale)

    def plan(self, out, a, b, bias):
        """A matmul's description for cuBLASLt, made once for each shape. cuBLASLt is column-major: our (M,N) array is
        its (N,M) matrix, so our b is its first operand (m,k) and our a its second (k,n)."""
        (n, k), m = a.shape, b.shape[1]
        first, second = is_transposed(b), is_transposed(a)  # whether cuBLASLt has to transpose its operand
        stride = (a.T if second else a).strides[0] // a.itemsize  # from one column of the second operand to the next
        to = FLOAT32 if out.dtype == np.float32 else BFLOAT16
        bf16 = self.precision.bf16
        key = f"{'NT'[first]}{'NT'[second]} {m} {n} {k}"
        key += f" of {stride}" if stride != (n if second else k) else ""
        key += f" {'bias ' if bias is not None else ''}{self.precision.matmul}"
        key += " to float32" if bf16 and to == FLOAT32 else ""
        if key not in self.plans:
            compute = COMPUTE_TF32 if self.precision.matmul == "tf32" else COMPUTE_FLOAT32
            description = cublasLt.matmul_desc_create(compute, FLOAT32)
            set_attribute(description, cublasLt.MatmulDescAttribute.TRANSA, first)
            set_attribute(description, cublasLt.MatmulDescAttribute.TRANSB, second)
            epilogue = cublasLt.Epilogue.DEFAULT if bias is None else cublasLt.Epilogue.BIAS
            set_attribute(description, cublasLt.MatmulDescAttribute.EPILOGUE, int(epilogue))
            dtype = BFLOAT16 if bf16 else FLOAT32
            shapes = (k, m) if first else (m, k), (n, k) if second else (k, n)
            self.plans[key] = SimpleNamespace(
                key=key, description=description, algorithm=None,
                b=cublasLt.matrix_layout_create(dtype, *shapes[0], shapes[0][0]),
                a=cublasLt.matrix_layout_create(dtype, *shapes[1], stride),
                out=cublasLt.matrix_layout_create(to, m, n, m))
        return self.plans[key]

    def choose(self, plan, run):
        """Return the recorded algorithm for this shape, else the fastest of cuBLASLt's candidates; when not searching,
        always its first."""
        matmul, key = self.matmul, plan.key

        def works(algorithm):
            try:
                run(algorithm)
            except cublasLt.cuBLASLtError:
                return False
            return True

        if key in matmul.known and matmul.searching:
            algorithm = np.array([(matmul.known[key],)], cublasLt.matmul_algo_dtype)
            if works(algorithm):
                matmul.chosen[key] = matmul.known[key]
                return algorithm
        candidates = [algorithm for algorithm in self.propose(plan) if works(algorithm)]
        if not candidates:
            raise UserError(f"cuBLASLt has no algorithm for a matmul of shape {key} on {matmul.identity}")
        if not matmul.searching:
            return candidates[0]
        found = candidates[fastest(self.device, [functools.partial(run, algorithm) for algorithm in candidates])]
        matmul.chosen[key] = found["data_"][0].tolist()
        matmul.searched += 1
        return found

    def propose(self, plan):
        """Return cuBLASLt's candidates, most promising first, each as a (1,) array; when not searching, at most one.

        When not searching, for the shapes of sampling, only algorithms that do not split sums: others split those of
        the last tiles, so that equal rows of the operands give different rows of the result.
        """
        whole, in_float32, in_any = 0, 2, 7  # cublasLtReductionScheme_t: no split; or the dtype that adds up the parts
        searching = self.matmul.searching
        schemes = whole if not searching else in_float32 if self.precision.bf16 else in_any
        preference = cublasLt.matmul_preference_create()
        attributes = cublasLt.MatmulPreferenceAttribute
        set_attribute(preference, attributes.MAX_WORKSPACE_BYTES, WORKSPACE, of="preference")
        set_attribute(preference, attributes.REDUCTION_SCHEME_MASK, schemes, of="preference")
        results, count = np.zeros(CANDIDATES, cublasLt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        cublasLt.matmul_algo_get_heuristic(self.handle, plan.description, plan.b, plan.a, plan.out, plan.out,
                                           preference, CANDIDATES, results.ctypes.data, count.ctypes.data)
        cublasLt.matmul_preference_destroy(preference)
        okay = [i for i in range(int(count[0])) if results["state"][i] == 0]
        return [np.ascontiguousarray(results["algo"][i : i + 1]) for i in (okay if searching else okay[:1])]


def is_transposed(array):
    """Whether a two-dimensional array is the transpose of a row-major one."""
    return array.strides[1] != array.itemsize


def set_attribute(target, attribute, value, of="desc"):
    """Set an attribute of a cuBLASLt matmul's description or preference."""
    dtype = getattr(cublasLt, f"get_matmul_{of}_attribute_dtype")(attribute)
    buffer = np.array([value], dtype)
    getattr(cublasLt, f"matmul_{of}_set_attribute")(target, attribute, buffer.ctypes.data, buffer.nbytes)
