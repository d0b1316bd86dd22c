"""The config group `rollout`: which engine samples, and where. It knows no other room, and no torch."""

from dataclasses import dataclass

from omegaconf import MISSING

INSTALL_VLLM = "pip install 'vllm>=0.26,<0.33' on a GPU machine; docs/vllm.md has the lines for one without"
WITHOUT_VLLM = f"rollout=vllm: vLLM is not installed: {INSTALL_VLLM}; or choose rollout=hf"


@dataclass
class RolloutConfig:
    engine: str = MISSING
    max_rows: int = 256
    async_steps: int = 0  # 1: the next batch is sampled, with weights one hand-over old, while one is learned
    placement: str = "auto"  # from here on: of rollout=vllm only
    sleep: bool = True
    kv_cache_gb: float | None = None
    attest: str = "stop"
    timeout_s: float = 600.0

    def problems(self) -> list[str]:
        bad = []
        for key, value, choices in (
            ("engine", self.engine, ("hf", "vllm")),
            ("placement", self.placement, ("auto", "shared", "second_gpu", "cpu")),
            ("attest", self.attest, ("stop", "warn", "off")),
        ):
            if value not in choices:
                bad.append(f"rollout.{key}={value} is none of {', '.join(map(str, choices))}: choose one")
        if self.async_steps and self.engine == "hf":
            bad.append(
                "rollout.async_steps=1 with rollout=hf: the embedded engine samples from the very weights that are "
                "being trained; set it to 0, or choose rollout=vllm"
            )
        if self.async_steps and self.engine == "vllm" and self.sleep and self.placement in ("auto", "shared"):
            bad.append(
                "rollout.async_steps=1 with rollout.sleep=true: an engine that samples during training cannot give "
                "its memory away; set rollout.sleep=false"
            )
        return bad
