"""cuBLASLt, NVIDIA's library of matmuls, through ctypes:
https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api. Each matmul uses the first algorithm
that cuBLASLt proposes."""

import ctypes
from types import SimpleNamespace

import numpy as np

from llmc.errors import UserError

WORKSPACE = 32 << 20  # bytes, as cuBLAS recommends for Hopper
FLOAT32, BFLOAT16 = 0, 14  # cudaDataType_t
COMPUTE_FLOAT32, COMPUTE_TF32 = 68, 77  # cublasComputeType_t
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8  # cublasLtMatmulDescAttributes_t
BATCH_COUNT, BATCH_STRIDE = 5, 6  # cublasLtMatrixLayoutAttribute_t
# cublasLtMatmulPreferenceAttributes_t
MAX_WORKSPACE_BYTES, REDUCTION_SCHEME_MASK, MIN_ALIGNMENT_A_BYTES = 1, 3, 5
ADD_BIAS, ADD_UP_IN_FLOAT32 = 4, 2  # cublasLtEpilogue_t; cublasLtReductionScheme_t
PROPOSAL = np.dtype([("algorithm", "u8", 8), ("workspace", "u8"), ("state", "i4"), ("waves", "f4"),
                     ("rest", "i4", 4)])
# Tensor cores truncate each addend to the last bit of the sum, which the losses show with 50304
# TF32 products in a chain, as in the gradient of lnf. So gradients of inputs are added up in
# float32 from shorter chains: dev/matmul.md.
LONGEST_CHAIN = 6400

POINTER = ctypes.c_void_p
INT = ctypes.c_int
SIZE = ctypes.c_uint64
FUNCTIONS = {
    "cublasLtCreate": (POINTER,),
    "cublasLtMatmulDescCreate": (POINTER, INT, INT),
    "cublasLtMatrixLayoutCreate": (POINTER, INT, SIZE, SIZE, SIZE),
    "cublasLtMatmulPreferenceCreate": (POINTER,),
    **{f"cublasLt{kind}SetAttribute": (POINTER, INT, POINTER, SIZE)
       for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference")},
    "cublasLtMatmulAlgoGetHeuristic": (*[POINTER] * 7, INT, POINTER, POINTER),
    "cublasLtMatmul": (*[POINTER] * 14, SIZE, POINTER),
}


def load_library():
    """The library's functions, with their signatures; raises UserError if it is not installed."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
        library = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(f"cuBLASLt cannot be loaded ({str(error).splitlines()[0]}): pip install -r"
                        " requirements-gpu.txt nvidia-cublas") from None
    for name, arguments in FUNCTIONS.items():
        getattr(library, name).argtypes = arguments
    library.cublasLtGetVersion.restype = SIZE
    return library


class CublasLt:
    """Matmuls of bfloat16 or float32 arrays on the GPU, with float32 sums."""

    def __init__(self, device, precision, workspace):
        """workspace(): an array of WORKSPACE bytes for the current stream."""
        self.device = device
        self.precision = precision
        self.workspace = workspace
        self.library = load_library()
        self.version = self.library.cublasLtGetVersion()
        self.handle = self.create("cublasLtCreate")
        self.plans = {}  # of matmuls, by shape

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status:
            raise UserError(f"{name} failed with status {status}: see nvidia-smi for the GPU's"
                            " memory and driver")

    def create(self, name, *arguments):
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def multiply(self, out, a, b, bias=None, scale=1.0, addend=None, factor=1.0, count=None):
        """out (M,N) = scale * a (M,K) @ b (K,N) + bias (N,) + factor * addend (M,N); or stacks of
        matrices, (n,M,N) and so on, by the algorithm for a stack of `count`, by default n. a and b
        may be transposed; addend may be out."""
        plan = self.plan(out, a, b, bias, count)
        addend, factor = (out, 0) if addend is None else (addend, factor)
        scales = np.array([scale, factor], np.float32)
        if bias is not None:
            self.set("MatmulDesc", plan.description, BIAS_POINTER, np.uint64(bias.data.ptr))
        with self.device.observe("cublaslt", (out, a, b)):
            self.call("cublasLtMatmul", self.handle, plan.description, scales.ctypes.data,
                      b.data.ptr, plan.b, a.data.ptr, plan.a, scales.ctypes.data + 4,
                      addend.data.ptr, plan.out, out.data.ptr, plan.out, plan.proposal.ctypes.data,
                      self.workspace().data.ptr, WORKSPACE, self.device.stream.ptr)

    def multiply_in_chains(self, out, a, b, scale=1.0):
        """out (M,N) = scale * a (M,K) @ b (K,N), with at most LONGEST_CHAIN TF32 products in one
        sum, if K allows."""
        K = length = b.shape[0]
        # the rows of a part begin at multiples of 16 bytes
        while self.precision.matmul == "tf32" and length > LONGEST_CHAIN and length % 8 == 0:
            length //= 2
        for begin in range(0, K, length):
            part = slice(begin, begin + length)
            self.multiply(out, a[:, part], b[part], scale=scale, addend=out if begin > 0 else None)

    def plan(self, out, a, b, bias, count):
        """A matmul's description for cuBLASLt, made once for each shape. cuBLASLt is column-major:
        our (M,N) array is its (N,M) matrix, so our b is its first operand (m,k) and our a its
        second (k,n)."""
        *stack, n, k, m = *a.shape, b.shape[-1]
        # whether cuBLASLt has to transpose its first and its second operand
        first = is_transposed(b)
        second = is_transposed(a)
        # from one column of the second operand to the next
        stride = max(a.strides[-2:]) // a.itemsize
        to = FLOAT32 if out.dtype == np.float32 else BFLOAT16
        aligned = tuple(min(256, array.data.ptr & -array.data.ptr) for array in (b, a, out))
        key = first, second, m, n, k, stride, bias is None, to, aligned, count, *stack
        if key not in self.plans:
            compute = COMPUTE_TF32 if self.precision.matmul == "tf32" else COMPUTE_FLOAT32
            description = self.create("cublasLtMatmulDescCreate", compute, FLOAT32)
            self.set("MatmulDesc", description, TRANSA, np.int32(first))
            self.set("MatmulDesc", description, TRANSB, np.int32(second))
            if bias is not None:
                self.set("MatmulDesc", description, EPILOGUE, np.uint32(ADD_BIAS))
            dtype = BFLOAT16 if self.precision.bf16 else FLOAT32
            # dtype, rows, columns, stride
            layouts = {"b": (dtype, k, m, k) if first else (dtype, m, k, m),
                       "a": (dtype, n, k, stride) if second else (dtype, k, n, stride),
                       "out": (to, m, n, m)}
            plan = SimpleNamespace(description=description,
                                   **{name: self.create("cublasLtMatrixLayoutCreate", *layout)
                                      for name, layout in layouts.items()})
            stacks = ((plan.a, a), (plan.b, b), (plan.out, out)) if stack else ()
            for layout, array in stacks:
                self.set("MatrixLayout", layout, BATCH_COUNT, np.int32(count or stack[0]))
                self.set("MatrixLayout", layout, BATCH_STRIDE,
                         np.int64(array.strides[0] // array.itemsize))
            plan.proposal = self.propose(plan, aligned)
            for layout, _ in stacks:
                self.set("MatrixLayout", layout, BATCH_COUNT, np.int32(stack[0]))
            self.plans[key] = plan
        return self.plans[key]

    def propose(self, plan, aligned):
        """cuBLASLt's first proposal, whose parts of sums, if it cuts them, are added up in
        float32."""
        preference = self.create("cublasLtMatmulPreferenceCreate")
        self.set("MatmulPreference", preference, MAX_WORKSPACE_BYTES, np.uint64(WORKSPACE))
        self.set("MatmulPreference", preference, REDUCTION_SCHEME_MASK,
                 np.uint32(ADD_UP_IN_FLOAT32))
        for i, size in enumerate((*aligned, aligned[2])):
            self.set("MatmulPreference", preference, MIN_ALIGNMENT_A_BYTES + i, np.uint32(size))
        proposal = np.zeros(1, PROPOSAL)
        count = np.zeros(1, np.int32)
        self.call("cublasLtMatmulAlgoGetHeuristic", self.handle, plan.description, plan.b, plan.a,
                  plan.out, plan.out, preference, 1, proposal.ctypes.data, count.ctypes.data)
        if not count[0] or proposal["state"][0]:
            raise UserError(f"cuBLASLt {self.version} has no algorithm for a matmul of this model"
                            f" on {self.device.gpu.name}")
        return proposal

    def set(self, kind, target, attribute, value):
        """Set an attribute of a matmul's description, layout or preference; value: a NumPy scalar
        of its size."""
        value = np.array([value])
        self.call(f"cublasLt{kind}SetAttribute", target, attribute, value.ctypes.data, value.nbytes)


def is_transposed(array):
    """Whether an array of matrices is the transpose of a row-major one."""
    return array.strides[-1] != array.itemsize
