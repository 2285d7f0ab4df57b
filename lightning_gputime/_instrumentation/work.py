"""The work of each step: number of items, FLOPs per item, precision, and peak FLOP/s of GPUs."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from math import isfinite, isnan, nan
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gputime._compat.torch_ import (
    enables_autocast,
    function_modes,
    unwrapped,
    without_function_modes,
)
from lightning_gputime._instrumentation.loop import Loop
from lightning_gputime._measurement.sums import ThroughputReference
from lightning_gputime._messages import messages
from lightning_gputime._phases import IN_NO_STEP
from lightning_gputime._record.clock import device_of
from lightning_gputime._record.recorder import IDLE, OPEN, Recorder

# Dense peaks of GPUs in TFLOP/s: without sparsity, which data sheets often show first. 16-bit
# figures are with 32-bit accumulation, as in training. Figures without a source are left out. The
# names are those of torch, without the maker and the memory. Each row has its sources by number:
#  1 lightning/fabric/utilities/throughput.py, _CUDA_FLOPS, which names the data sheets. Not its
#    H200 and H100 NVL, which are sparse, nor 16 bits on GA102 and Ada, without tensor cores
#  2 stanford-crfm/levanter, src/levanter/utils/flop_utils.py
#  3 stas00/ml-engineering, compute/accelerator/README.md
#  4 pytorch/torchtitan, torchtitan/tools/utils.py, get_peak_flops
#  5 karpathy/nanochat, nanochat/common.py, in copies
#  6 https://www.mullet.se/product.html?product_id=355414 (a data sheet's table)
#  7 https://www.ecer.com/corp/details-uuuedqa-p1bsay9-... (a data sheet's table)
#  8 https://glennklockwood.com/garden/processors/B200 and
#    https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html
#  9 https://waredb.com/processor/nvidia-geforce-rtx-4090
# 10 tables of 16 bits in several repositories; no other source was found
_PEAKS: Mapping[str, Mapping[str, float]] = {
    "H200 NVL": {"bf16": 836.0, "fp16": 836.0},  # 5
    "H200": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},  # 3
    "GH200": {"bf16": 989.0, "fp16": 989.0},  # 10
    "H100 NVL": {"bf16": 835.0, "fp16": 835.0},  # 4
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.2},  # 1
    "H100": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},  # 1
    "GB200": {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 80.0},  # 3, 8
    "B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1100.0, "fp32": 75.0},  # 3, 8
    "A100": {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5},  # 1
    "A30": {"bf16": 165.0, "fp16": 165.0},  # 5
    "A10": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},  # 1, 16 bits 2
    "A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},  # 5, 16 bits 7, 32 bits 1
    "RTX A6000": {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},  # 10, 32 bits 1
    "L40S": {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6},  # 3, 6
    "L40": {"bf16": 181.0, "fp16": 181.0, "tf32": 90.5, "fp32": 90.5},  # 1, 6
    "L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},  # 1
    "T4": {"fp16": 65.0, "fp32": 8.1},  # 1
    "V100-SXM2": {"fp16": 125.0, "fp32": 15.7},  # 1
    "V100-PCIE": {"fp16": 112.0, "fp32": 14.0},  # 1
    "RTX 4090": {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6},  # 5, 9, 32 bits 1
    "RTX 3090": {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6},  # 5, 32 bits 1
    "MI300X": {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4},  # 3
    "MI325X": {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4},  # 4, 5
}
# Parts of device names that the names in `_PEAKS` do not contain.
_MAKER = re.compile(r"^(NVIDIA |AMD |Tesla |GeForce |Instinct )+")
_MEMORY = re.compile(r"([ -](\d+GB|HBM\d\w*|SXM[45]|OAM|(?<=A100-)PCIE|(?<=GB )PCIe))+$")
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def dtype_of_call(model: nn.Module, device: torch.device) -> torch.dtype:
    """Return the dtype that a model call would compute in if it began now."""
    kind = device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    for value in _closure_values(unwrapped(model).forward):
        is_autocast = isinstance(value, torch.autocast) and value.device == kind
        if is_autocast and enables_autocast(value):
            dtype: torch.dtype = value.fast_dtype
            return dtype
    return dtype_of(model)


def _closure_values(function: Any) -> Iterator[Any]:
    """Yield the closure variables of a function and of the functions that it wraps.

    Accelerate stores its autocast in a closure variable of a function that wraps `forward`.
    """
    while function is not None:
        function = getattr(function, "__func__", function)
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # The cell is empty.
                yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter, or the default dtype of torch."""
    parameters = nn.Module.parameters(model)
    dtypes = (parameter.dtype for parameter in parameters if parameter.is_floating_point())
    return next(dtypes, torch.get_default_dtype())


def precision_of(model: nn.Module, dtype: torch.dtype, device: torch.device) -> str:
    """Return the name of a precision: "bf16", "fp16", "tf32", "fp32", or another dtype's name."""
    if dtype is torch.float32 and device.type == "cuda" and _allows_tf32(model, device):
        return "tf32"  # Tensors have the dtype float32, but the peak is higher.
    name = str(dtype).removeprefix("torch.")
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
    return short.get(name, name)


def _allows_tf32(model: nn.Module, device: torch.device) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False

    # By default torch allows TF32 in convolutions but not in matrix products. Follow the setting
    # of the kind of layer that has most of the parameters.
    def n_parameters(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in nn.Module.parameters(module))

    modules = nn.Module.modules(model)
    convolutions = [module for module in modules if isinstance(module, _CONVOLUTIONS)]
    if 2 * sum(map(n_parameters, convolutions)) > n_parameters(model):
        setting = getattr(torch.backends.cudnn, "conv", None)
        if setting is not None:
            return bool(setting.fp32_precision == "tf32")
        return bool(torch.backends.cudnn.allow_tf32)
    try:
        # Raises if the setting was changed through the newer `fp32_precision`.
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def peaks_tflops(device_name: str) -> Mapping[str, float]:
    """Return the dense peak of a GPU for each precision (in TFLOP/s); empty if unknown."""
    # Without maker and memory size, match the full name. A suffix means a different GPU, such as a
    # laptop GPU, a "Ti" or a MIG slice.
    return _PEAKS.get(_MAKER.sub("", _MEMORY.sub("", device_name)), {})


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "a CPU"
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


_NO_ITEMS = "flops= is per item, but the number of items in a batch is unknown: pass items="


class WorkCounter:
    """Counter of the items in the open step, and FLOPs per item with the peak of the device."""

    def __init__(self, items: Any, flops: Any, loop: Loop, recorder: Recorder) -> None:
        self._recorder = recorder
        self._items = Items(items)
        self._step_items = 0.0  # Items of the earlier batches of the open step; NaN if unknown.
        self._batch_items = self._items.fixed  # Items of the current batch; NaN if unknown.
        self._has_flops = flops is not None
        # FLOPs per item of a step, of forward and of backward; NaN if unknown.
        per_item = nan, nan, nan
        if isinstance(flops, list | tuple):
            per_item = sum(flops), *flops
        elif flops is not None:
            per_item = float(flops), nan, nan
        self.reference = ThroughputReference(self._items.source, flops=per_item)
        self._unknown_steps = 0  # Number of consecutive steps with unknown items.
        if not self._has_flops:
            return
        self._device = device_of(loop.model)
        self._name = device_name(self._device)
        self._peaks = peaks_tflops(self._name)
        if loop.compiled_step and (dtype := dtype_of(loop.model)).itemsize <= 2:
            # Hooks see neither model calls nor an autocast inside a compiled step.
            self._set_precision(loop.model, dtype)

    @property
    def on_call(self) -> Callable[[nn.Module], None] | None:
        """Function to call with the module of each model call in a timed step, or None."""
        return self._find_precision if self._has_flops else None

    def add_batch(self, batch: Any) -> None:
        """Count the items of a batch, if its time is in a timed step."""
        if self._recorder.state is not OPEN or self._recorder.label in IN_NO_STEP:
            return
        items = self._items
        if function_modes():
            with without_function_modes():
                self._batch_items = items.of(batch)
            return
        if type(batch) is items.kind:
            # Same as `Items.of` in the most common case, without another call.
            try:
                first = batch if items.key is None else batch[items.key]
                self._batch_items = first.shape[0]
                return
            except Exception:
                pass  # The contents have another structure than those of the last batch.
        self._batch_items = items.of(batch)

    def end_batch(self) -> None:
        """End a batch. The step may continue with another batch."""
        if self._recorder.state is IDLE:
            return  # No step is timed.
        self._step_items += self._batch_items
        self._batch_items = self._items.fixed

    def take_items(self) -> float:
        """End the last batch. Return the number of items in the step, or NaN if unknown."""
        items = self._step_items + self._batch_items
        self._step_items, self._batch_items = 0.0, self._items.fixed
        if self._has_flops:
            self._unknown_steps = self._unknown_steps + 1 if isnan(items) else 0
            # A single batch of unknown size needs no warning.
            if self._unknown_steps == 2 and self.reference.note != _NO_ITEMS:
                messages.warning(_NO_ITEMS)
                self.reference.set_note(_NO_ITEMS)
        return items

    def reset(self) -> None:
        """Drop the items of the open step."""
        self._step_items, self._batch_items = 0.0, self._items.fixed

    def _find_precision(self, model: nn.Module) -> None:
        if self.reference.precision or self.reference.note:
            return
        try:
            self._set_precision(model, dtype_of_call(model, self._device))
        except Exception as error:  # For example, parameters without a shape.
            self.reference.set_note(
                f"the precision is unknown ({error!r:.100}), so the MFU is unavailable"
            )

    def _set_precision(self, model: nn.Module, dtype: torch.dtype) -> None:
        precision = precision_of(model, dtype, self._device)
        self.reference.set_precision(precision, self._peaks.get(precision))
        if precision not in self._peaks:
            why = f"the {precision} peak of {self._name} is unknown"
            self.reference.set_note(f"{why}, so the MFU is unavailable")


class Items:
    """Number of items in a batch, from the option `items` or the size of the first tensor."""

    def __init__(self, option: Callable[[Any], Any] | float | None) -> None:
        self.fixed = nan
        """Items of each batch if the option is a number, else NaN."""
        # Type of the last batch, and the key of its first tensor; no key if the batch is a tensor.
        self.kind: Any = None
        self.key: Any = None
        self.of: Callable[[Any], float] = self._of_first
        """Function that returns the number of items in a batch, or NaN if unknown."""
        self.source = "the first dimension of the batch's first tensor"
        """Description of where the number comes from."""
        if callable(option):
            self.of, self.source = partial(self._of_function, option), "the function items="
        elif option is not None:
            self.fixed = float(option)
            self.of, self.source = lambda _: self.fixed, f"items={self.fixed:g}"

    def _of_first(self, batch: Any) -> float:
        """Return the size where `_search` has found it last; search again in another type."""
        if type(batch) is self.kind:
            with suppress(Exception):  # Its structure may differ from that of the last batch.
                return float((batch if self.key is None else batch[self.key]).shape[0])
        return self._search(batch) if isinstance(batch, (Tensor, Mapping, list, tuple)) else nan

    def _search(self, batch: Any) -> float:
        """Return the size of the first dimension if it is the same in all tensors, else NaN.

        Remember where the first tensor is, if that is at the top level of the batch.
        """
        self.kind = None
        # A list of dicts contains rows that were not collated. The number of rows is then not the
        # size of a tensor.
        if isinstance(batch, list) and batch and isinstance(batch[0], Mapping):
            return nan
        try:
            found = [*_tensors(batch, ())]
            sizes = {int(tensor.shape[0]) for _, tensor in found}
        except Exception:
            return nan
        # If sizes differ, the first tensor may be an image, a table or packed rows.
        if len(sizes) != 1:
            return nan
        keys, _ = found[0]
        if len(keys) <= 1:
            self.kind, self.key = type(batch), keys[0] if keys else None
        return float(sizes.pop())

    def _of_function(self, function: Callable[[Any], Any], batch: Any) -> float:
        try:
            value = function(batch)
            if isinstance(value, Tensor):
                if value.device.type != "cpu":
                    raise TypeError(
                        f"items returned a tensor on {value.device}, and reading it would make the"
                        " host wait for the device: return a size, such as len(batch[0]) or"
                        " batch[0].numel()"
                    )
                value = value.item()
            if isinstance(value, bool) or not hasattr(value, "__float__"):
                raise TypeError(f"items must return a number, got {value!r:.80}")
            found = float(value)
            if not isfinite(found) or found < 0:
                raise ValueError(f"items must return a finite number of 0 or more, got {found}")
            return found
        except Exception as error:
            self.of = _unknown_number
            messages.warning(
                "Items are no longer counted, because the function items= failed: %r", error
            )
            return nan


def _unknown_number(_: object) -> float:
    # Not a lambda, because a timer that is pickled contains this function.
    return nan


def _tensors(batch: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the tensors in a batch, except scalars, each after the keys that lead to it."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield keys, batch
        return
    if isinstance(batch, Mapping):
        # Do not use `len(batch)`: for a TensorDict, that is the batch size, not the number of keys.
        inside: Any = [*batch.keys()]
    elif isinstance(batch, list | tuple):
        inside = range(len(batch))
    else:
        return
    if len(keys) >= 8 or len(inside) > 64:
        raise ValueError("unknown structure of a batch")
    for key in inside:
        yield from _tensors(batch[key], (*keys, key))
