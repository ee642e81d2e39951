"""NVIDIA GPUs that tests do not have: what SGLang and Triton ask of each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Gpu:
    """One compute capability.

    Attributes:
        sm: major version times ten plus minor version.
        shared_memory: bytes that one thread block can have (`shared_memory_per_block_optin`).
        cards: some that have it.
        same_code_as: name of a GPU for which Triton makes the same code of all kernels but attention of trees.
    """

    sm: int
    shared_memory: int
    cards: str
    same_code_as: str | None = None

    @property
    def name(self) -> str:
        return f"sm_{self.sm}"

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.sm, 10)

    def resolving(self) -> AbstractContextManager:
        """Let SGLang resolve arguments as on a machine with this GPU, with FlashInfer and CUDA 12.3 or later."""
        # Imported here: programs that only compile kernels need no SGLang.
        from sglang.srt.runtime_context import override_platform

        major = self.capability[0]
        return override_platform(
            is_cuda=True,
            has_flashinfer=True,
            is_sm90=major == 9,
            is_hopper_with_cuda_12_3=major == 9,
            is_sm100=major == 10,
            is_sm100_or_sm110=major in (10, 11),
            is_sm110=major == 11,
            is_sm120=major == 12,
            is_blackwell=major in (10, 12),
            device_sm=self.sm,
            device_capability=self.capability,
        )


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(80, 163 * KIB, "A100"),
        Gpu(86, 99 * KIB, "RTX 3090, A10", same_code_as="sm_80"),
        Gpu(89, 99 * KIB, "RTX 4090, L40S", same_code_as="sm_80"),
        Gpu(90, 227 * KIB, "H100, H200"),
        Gpu(100, 227 * KIB, "B200, GB200"),
        Gpu(103, 227 * KIB, "B300, GB300", same_code_as="sm_100"),
        Gpu(120, 99 * KIB, "RTX 5090, RTX PRO 6000"),
    )
}
