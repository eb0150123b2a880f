"""The CUDA driver, as narrow as the launcher needs it: load, look up, map, launch. Every call is checked.

`Driver` is the interface; `CudaDriver` keeps it through cuda-python's bindings, which load when one is made. Handles
are whatever the driver gives. Addresses are ints, strings are ASCII, sizes bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from pagedmla.cutlass_kernels.tensor_maps import MAP_BYTES, TiledMap


class DriverError(RuntimeError):
    """A driver call failed. The message has the call, what it was for, and the driver's own name and text."""


@dataclass(frozen=True)
class LaunchShape:
    """How a kernel is launched.

    grid              CTAs along x, a multiple of `cluster`
    threads           of a CTA
    shared_bytes      dynamic shared memory of a CTA
    cluster           CTAs that share barriers and multicasts
    may_start_early   programmatic dependent launch: the kernel itself waits for the one before it
    """

    grid: int
    threads: int
    shared_bytes: int
    cluster: int = 1
    may_start_early: bool = False

    def __post_init__(self) -> None:
        if self.cluster < 1 or self.grid < 1 or self.grid % self.cluster:
            raise ValueError(f"grid: expected a multiple of cluster {self.cluster}; got {self.grid}")


class Driver(Protocol):
    """What the launcher asks for. All but `make_current` need a current context, as in CUDA."""

    def make_current(self, device: int) -> None:
        """Give a thread that has no context yet the device's primary one, which is torch's too."""

    def load(self, cubin: bytes) -> Any:
        """A module in the current context."""

    def function(self, module: Any, name: str) -> Any:
        """A kernel of a module."""

    def allow_shared(self, function: Any, shared_bytes: int) -> None:
        """Let a kernel have so much dynamic shared memory a CTA, and all that an SM has for its CTAs."""

    def active_clusters(self, function: Any, shape: LaunchShape) -> int:
        """Clusters of this shape that the device holds at a time."""

    def encode(self, tiles: TiledMap) -> bytes:
        """A tensor map: 128 opaque bytes."""

    def prepare(self, function: Any, shape: LaunchShape, addresses: Sequence[int]) -> Callable[[int], None]:
        """A launch that reads each parameter at its address; call it with a stream's handle.

        The parameters are copied during the call. One call at a time.
        """


class CudaDriver:
    """The interface through `cuda.bindings.driver`.

    `bindings` takes the place of that module where given. Without it, ImportError says what to install where there is
    no cuda-python, and DriverError where the machine has no driver library.
    """

    def __init__(self, bindings: Any = None) -> None:
        self._cuda = _import_bindings() if bindings is None else bindings
        try:
            self._call("cuInit", 0, purpose="to start the driver")
        except DriverError:
            raise
        except RuntimeError as missing:  # the bindings look for libcuda at their first call
            raise DriverError(f"cuInit: no CUDA driver library on this machine ({missing})") from missing

    def make_current(self, device: int) -> None:
        if int(self._call("cuCtxGetCurrent", purpose="to find the thread's context")) == 0:
            handle = self._call("cuDeviceGet", device, purpose=f"to find device {device}")
            context = self._call("cuDevicePrimaryCtxRetain", handle, purpose=f"to use device {device}")
            self._call("cuCtxSetCurrent", context, purpose=f"to use device {device}")

    def load(self, cubin: bytes) -> Any:
        return self._call("cuModuleLoadData", cubin, purpose=f"to load a cubin of {len(cubin)} bytes")

    def function(self, module: Any, name: str) -> Any:
        return self._call("cuModuleGetFunction", module, name.encode("ascii"), purpose=f"to find {name}")

    def allow_shared(self, function: Any, shared_bytes: int) -> None:
        attributes = self._cuda.CUfunction_attribute
        purpose = f"to allow {shared_bytes} bytes of shared memory a CTA"
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),  # percent
        ):
            self._call("cuFuncSetAttribute", function, attribute, value, purpose=purpose)

    def active_clusters(self, function: Any, shape: LaunchShape) -> int:
        purpose = f"to count clusters of {shape.cluster}"
        return int(self._call("cuOccupancyMaxActiveClusters", function, self._config(shape), purpose=purpose))

    def encode(self, tiles: TiledMap) -> bytes:
        cuda = self._cuda
        encoded = self._call(
            "cuTensorMapEncodeTiled",
            cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(tiles.dims),
            tiles.address,
            [cuda.cuuint64_t(dim) for dim in tiles.dims],
            [cuda.cuuint64_t(stride) for stride in tiles.strides],
            [cuda.cuuint32_t(size) for size in tiles.box],
            [cuda.cuuint32_t(1) for _ in tiles.dims],
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{tiles.swizzle}B"),
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            purpose=f"to map {tiles}",
        )
        return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)

    def prepare(self, function: Any, shape: LaunchShape, addresses: Sequence[int]) -> Callable[[int], None]:
        config = self._config(shape)
        # One pointer a parameter, since only the compiler knows where a packed block would need each.
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        pointers_address = ctypes.addressof(pointers)
        launch, success = self._cuda.cuLaunchKernelEx, self._cuda.CUresult.CUDA_SUCCESS

        def start(stream: int, _keep_alive: Any = pointers) -> None:
            config.hStream = stream
            (error,) = launch(config, function, pointers_address, 0)
            if error != success:
                self._refuse(error, "cuLaunchKernelEx", f"to launch {shape}")

        return start

    def _config(self, shape: LaunchShape) -> Any:
        cuda = self._cuda
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
        config.sharedMemBytes = shape.shared_bytes
        attributes = [self._attribute("CLUSTER_DIMENSION")]
        size = attributes[0].value.clusterDim
        size.x, size.y, size.z = shape.cluster, 1, 1
        if shape.may_start_early:
            attributes.append(self._attribute("PROGRAMMATIC_STREAM_SERIALIZATION"))
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def _attribute(self, name: str) -> Any:
        attribute = self._cuda.CUlaunchAttribute()
        attribute.id = getattr(self._cuda.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        return attribute

    def _call(self, name: str, *arguments: Any, purpose: str) -> Any:
        """What a call gives besides its error code."""
        error, *results = getattr(self._cuda, name)(*arguments)
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            self._refuse(error, name, purpose)
        return results[0] if results else None

    def _refuse(self, error: Any, name: str, purpose: str) -> NoReturn:
        _, text = self._cuda.cuGetErrorString(error)
        said = text.decode() if text else "no text"
        raise DriverError(f"{name}, {purpose}: {getattr(error, 'name', error)} ({said})")


def _import_bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as missing:
        raise ImportError("cutlass: cuda-python isn't installed; pip install pagedmla[cutlass]") from missing
    return driver
