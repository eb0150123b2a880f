"""The driver interface over cuda-python: calls checked, errors worded, structures filled as the driver reads them.

cuda-python's own types are used where it is installed; its functions, which need a driver library, are replaced by ones
that note their arguments and give a chosen result. No driver stands behind them.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pagedmla.cutlass_kernels.driver import CudaDriver, DriverError, LaunchShape
from pagedmla.cutlass_kernels.tensor_maps import MAP_BYTES, TiledMap

SHAPE = LaunchShape(grid=132, threads=384, shared_bytes=1000, cluster=2, may_start_early=True)
TILES = TiledMap(0x7F0000000000, (512, 64, 100), (640, 40960), (128, 64, 1), 128)


class Noted:
    """cuda-python's types, with functions that note what they are called with."""

    def __init__(self, types, **results):
        self.types, self.calls, self.results = types, [], results

    def __getattr__(self, name):
        if not name.startswith("cu") or name.startswith("cuuint"):
            return getattr(self.types, name)

        def called(*arguments):
            self.calls.append((name, arguments))
            return self.results.get(name, (self.types.CUresult.CUDA_SUCCESS,))

        return called


@pytest.fixture
def cuda():
    return pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install pagedmla[cutlass]")


def noted(cuda, **results):
    ok = cuda.CUresult.CUDA_SUCCESS
    return Noted(cuda, **{name: (ok, value) for name, value in results.items()})


def test_a_map_is_encoded_as_tiles_of_bytes(cuda):
    bindings = noted(cuda, cuTensorMapEncodeTiled=cuda.CUtensorMap())
    assert len(CudaDriver(bindings).encode(TILES)) == MAP_BYTES
    name, arguments = bindings.calls[-1]
    assert name == "cuTensorMapEncodeTiled"
    kind, rank, address, dims, strides, box, steps, interleave, swizzle, _, fill = arguments
    assert kind == cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8
    assert (rank, address) == (3, TILES.address)
    assert [[int(x) for x in xs] for xs in (dims, strides, box, steps)] == [
        [512, 64, 100],
        [640, 40960],
        [128, 64, 1],
        [1, 1, 1],
    ]
    assert interleave == cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert swizzle == cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert fill == cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


def test_a_launch_names_each_parameter_by_address_and_its_stream_at_the_call(cuda):
    """An H200 read garbage: the compiler had put the first parameter at byte 48, where a packed block began at 0."""
    bindings = noted(cuda)
    parameters = ctypes.create_string_buffer(b"parameters", 600)
    addresses = [ctypes.addressof(parameters) + place for place in (0, 128, 256)]
    start = CudaDriver(bindings).prepare("a function", SHAPE, addresses)
    for stream in (7, 8):
        start(stream)
        name, (config, function, pointers, extra) = bindings.calls[-1]
        assert (name, function, extra) == ("cuLaunchKernelEx", "a function", 0)
        assert list((ctypes.c_void_p * 3).from_address(pointers)) == addresses
        assert int(config.hStream) == stream
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (132, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (384, 1, 1)
    assert config.sharedMemBytes == 1000


def test_launch_attributes(cuda):
    bindings = noted(cuda, cuOccupancyMaxActiveClusters=66)
    driver = CudaDriver(bindings)
    assert driver.active_clusters("f", SHAPE) == 66
    config = bindings.calls[-1][1][1]
    ids = cuda.CUlaunchAttributeID
    cluster, early = config.attrs
    assert config.numAttrs == 2
    assert cluster.id == ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert (cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z) == (2, 1, 1)
    assert early.id == ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert early.value.programmaticStreamSerializationAllowed == 1
    driver.active_clusters("f", LaunchShape(grid=1, threads=32, shared_bytes=0))
    assert bindings.calls[-1][1][1].numAttrs == 1


def test_a_thread_without_a_context_gets_the_devices_primary_one(cuda):
    bindings = noted(cuda, cuCtxGetCurrent=cuda.CUcontext(0), cuDeviceGet="device", cuDevicePrimaryCtxRetain="context")
    CudaDriver(bindings).make_current(3)
    assert bindings.calls[1:] == [
        ("cuCtxGetCurrent", ()),
        ("cuDeviceGet", (3,)),
        ("cuDevicePrimaryCtxRetain", ("device",)),
        ("cuCtxSetCurrent", ("context",)),
    ]
    bindings = noted(cuda, cuCtxGetCurrent=cuda.CUcontext(77))
    CudaDriver(bindings).make_current(3)
    assert len(bindings.calls) == 2


def test_modules_functions_and_shared_memory(cuda):
    bindings = noted(cuda, cuModuleLoadData="module", cuModuleGetFunction="function")
    driver = CudaDriver(bindings)
    assert driver.function(driver.load(b"cubin"), "decode") == "function"
    driver.allow_shared("function", 200_000)
    attributes = cuda.CUfunction_attribute
    assert bindings.calls == [
        ("cuInit", (0,)),
        ("cuModuleLoadData", (b"cubin",)),
        ("cuModuleGetFunction", ("module", b"decode")),
        ("cuFuncSetAttribute", ("function", attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 200_000)),
        ("cuFuncSetAttribute", ("function", attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)),
    ]


@pytest.mark.parametrize(
    ("call", "ask", "purpose"),
    [
        ("cuInit", lambda driver: None, "to start the driver"),
        ("cuModuleLoadData", lambda driver: driver.load(b"12345"), "to load a cubin of 5 bytes"),
        ("cuModuleGetFunction", lambda driver: driver.function("m", "decode"), "to find decode"),
        ("cuFuncSetAttribute", lambda driver: driver.allow_shared("f", 9), "to allow 9 bytes of shared memory a CTA"),
        ("cuOccupancyMaxActiveClusters", lambda driver: driver.active_clusters("f", SHAPE), "to count clusters of 2"),
        (
            "cuTensorMapEncodeTiled",
            lambda driver: driver.encode(TILES),
            "to map [512, 64, 100] bytes at 0x7f0000000000, strides [640, 40960], boxes [128, 64, 1]",
        ),
        (
            "cuLaunchKernelEx",
            lambda driver: driver.prepare("f", SHAPE, [])(0),
            "to launch LaunchShape(grid=132, threads=384, shared_bytes=1000, cluster=2, may_start_early=True)",
        ),
    ],
)
def test_every_call_is_checked_and_its_error_says_what_for(cuda, call, ask, purpose):
    failed = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    bindings = noted(cuda, cuGetErrorString=b"invalid argument")
    bindings.results[call] = (failed, None) if call not in ("cuInit", "cuLaunchKernelEx") else (failed,)
    with pytest.raises(DriverError) as caught:
        ask(CudaDriver(bindings))
    assert str(caught.value) == f"{call}, {purpose}: CUDA_ERROR_INVALID_VALUE (invalid argument)"


def test_a_machine_without_a_driver_library_is_told_apart(cuda):
    def missing(flags):
        raise RuntimeError("libcuda not found")

    with pytest.raises(DriverError, match=r"cuInit: no CUDA driver library on this machine \(libcuda not found\)"):
        CudaDriver(SimpleNamespace(cuInit=missing))


def test_without_cuda_python_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match=r"cuda-python isn't installed; pip install pagedmla\[cutlass\]"):
        CudaDriver()


def test_importing_the_launcher_loads_neither_cuda_nor_the_dsl():
    code = """if True:
        import sys, torch
        before = set(sys.modules)  # torch, or a .pth file, may have brought them
        import pagedmla.cutlass_kernels.launch
        print({name.split(".")[0] for name in set(sys.modules) - before} & {"cuda", "cutlass", "triton"})
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(("grid", "cluster"), [(131, 2), (0, 1), (4, 0)])
def test_a_grid_that_clusters_cannot_fill_is_refused(grid, cluster):
    with pytest.raises(ValueError, match="grid: expected a multiple of cluster"):
        LaunchShape(grid=grid, threads=32, shared_bytes=0, cluster=cluster)
