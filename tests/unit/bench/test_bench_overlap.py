"""What is exposed of communication, by the spans that a profiler gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]

from unipar.benchmark.overlap import on_cpu, on_gpu, total, union, without

SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda one: (one[0], one[0] + one[1])),
    max_size=8,
)


def event(name: str, begin: float, end: float, **more: Any) -> Any:
    values = {"thread": 1, "is_async": False, "device_type": DeviceType.CPU, **more}
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=begin, end=end), **values)


def moments(spans: Any) -> set[int]:
    return {moment for begin, end in spans for moment in range(begin, end)}


@given(SPANS, SPANS)
def test_spans_are_sets_of_moments(some: Any, others: Any) -> None:
    assert moments(union(some)) == moments(some)
    left = list(without(union(some), union(others)))
    assert moments(left) == moments(some) - moments(others)
    assert total(left) == len(moments(left))


def test_gloo_communicates_and_operators_compute() -> None:
    communication, computation = on_cpu(
        [
            event("gloo:all_reduce", 10, 30, thread=2, is_async=True),
            event("c10d::allreduce_", 9, 11),
            event("aten::mm", 5, 15),
            event("aten::add", 14, 18),
            # Gloo's own copying is part of communicating.
            event("aten::copy_", 20, 22, thread=2),
            event("Optimizer.step#SGD.step", 0, 40),
        ]
    )
    assert communication == [(10, 30)]
    assert computation == [(5, 18)]
    assert total(without(communication, computation)) == 12


def test_kernels_of_nccl_communicate_and_others_compute() -> None:
    cuda = {"device_type": DeviceType.CUDA}
    communication, computation = on_gpu(
        [
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 30, **cuda),
            event("nccl:all_reduce", 10, 30, is_user_annotation=True, **cuda),
            event("sm90_xmma_gemm_f32", 20, 25, **cuda),
            event("Memcpy DtoH (Device -> Pageable)", 26, 28, **cuda),
            event("aten::mm", 0, 40),
        ]
    )
    assert communication == [(10, 30)]
    assert computation == [(20, 25)]
