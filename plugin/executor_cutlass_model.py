"""The executable model of the CUTLASS decode kernels, on the CPU: their algorithm, fragment by fragment, in numpy.

It is for proof, so it runs only where it is asked for by name. Which variant it models is chosen as the `cutlass`
executor chooses one, and cut as on an H200; what that variant's launcher refuses is refused here too, in its words.
Prompts behind decode rows, and all other operations, are `torch`'s.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pagedmla.hardware.cost import H200
from pagedmla.plugin import executor_cutlass_variants as variants
from pagedmla.plugin.executor_torch import TorchExecutor
from pagedmla.plugin.executors import AttendOptions, Capacity, Configuration, Executor, NoWorkspace, Workspace
from pagedmla.plugin.step import Step


class CutlassModelExecutor(TorchExecutor):
    name = "cutlass-model"
    summary = "the CUTLASS kernels' executable model in numpy"

    def serving(self, operation: str) -> Executor:
        return self if operation == "attend" else TorchExecutor()

    def refusal(self, configuration: Configuration) -> str | None:
        if configuration.device.type != "cpu":
            return f"the model runs on the CPU, not on {configuration.device.type}"
        return variants.refusal(configuration)

    def drawback(self, configuration: Configuration) -> str | None:
        return "it is a model, for proof"

    def kernels(self, configuration: Configuration, capacity: Capacity) -> tuple[str, ...]:
        used = variants.uses(configuration, capacity)
        return tuple(f"{use}: the model of {use.variant.name}" for use in used)

    def partitions(self, configuration: Configuration, capacity: Capacity, requests: int, tokens: int) -> int:
        return variants.pieces(configuration, capacity, requests, tokens, H200.multiprocessors)

    def workspace(self, configuration: Configuration, capacity: Capacity, num_partitions: int) -> Workspace:
        """None: the model keeps its pieces to itself."""
        return NoWorkspace()

    def attend(self, step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions) -> None:
        from pagedmla.cutlass_kernels import launch_checks, model

        q = q.detach()  # numpy takes no tensor that requires grad
        requests, tokens = step.decode_rows
        whole = requests == step.batch
        rows = slice(0, step.num_tokens if whole else tokens)  # whole: padding behind the last request too
        if rows.stop:
            decode, variant = _part(step, 0, requests), variants.variant_of_step(step, q, options, requests, tokens)
            tensors = launch_checks.CallTensors(
                q[rows],
                out[rows],
                lse[rows],
                decode.cache.lookup_table,
                decode.cache.scales_lookup_table,
                decode.cache.cache_lengths,
                decode.query_start_loc,
            )
            launch_checks.check_form(variant, tensors)
            launch_checks.check_addresses(tensors.q.data_ptr(), tensors.out.data_ptr())
            out[rows], lse[rows] = model.attend(
                q[rows],
                step.planes,
                decode.cache.lookup_table,
                decode.cache.cache_lengths,
                decode.query_start_loc,
                sm_scale=options.sm_scale,
                variant=variant,
                causal=options.causal,
                scales_lookup_table=decode.cache.scales_lookup_table,
                num_partitions=options.num_partitions,
                workers=H200.multiprocessors // variant.cluster,
            )
        if not whole:
            prompts, behind = _part(step, requests, step.batch), slice(tokens, None)
            alone = replace(options, num_partitions=1, workspace=None)
            super().attend(prompts, q[behind], out[behind], lse[behind], alone)


def _part(step: Step, first: int, end: int) -> Step:
    """Requests first .. end - 1 of a step on the host as a step of their own."""
    rows, starts = slice(first, end), step.query_start_loc[first : end + 1]
    cache = replace(
        step.cache,
        cache_lengths=step.cache.cache_lengths[rows],
        lookup_table=step.cache.lookup_table[rows],
        scales_lookup_table=step.cache.scales_lookup_table[rows],
    )
    return replace(
        step,
        values=replace(step.values, mixed_step_split=None),
        cache=cache,
        query_start_loc=starts - starts[0],
        num_tokens=int(starts[-1] - starts[0]),
        one_token_each=False,
    )
