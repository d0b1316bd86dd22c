"""The settings of SFT and of expert iteration: learning to write given or found responses."""

from dataclasses import dataclass

from omegaconf import MISSING

from rlreason.config.training import OnlineConfig, TrainingConfig


@dataclass
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning: -log p on the response tokens of given traces."""

    algorithm: str = "sft"
    n_steps: int | None = MISSING
    epochs: float | None = MISSING  # passes over the traces, with n_steps=null: one of the two is set

    @property
    def reads_traces(self) -> bool:
        return True

    def describe_batch(self, n_steps: int) -> str:
        return f"{n_steps} optimizer steps of {self.train_batch_size} traces"

    def problems(self) -> list[str]:
        bad = super().problems()
        if (self.n_steps is None) == (self.epochs is None):
            bad.append(
                f"n_steps={self.n_steps} and epochs={self.epochs}: set one and leave the other null "
                "(epochs=3 n_steps=null, or n_steps=100 epochs=null)"
            )
        return bad


@dataclass
class EIConfig(OnlineConfig):
    """Expert iteration: sample, keep what is correct, SFT on it, repeat. RFT and STaR are settings of it."""

    algorithm: str = "ei"
    question_batch_size: int = MISSING  # different questions per step
    sft_epochs: int = MISSING  # passes over the kept responses of a step
    max_per_question: int | None = None  # kept responses per question at most; null: all that are correct
    deduplicate: bool = False  # keep a response that says the same as another to its question only once (RFT)
    restart: bool = False  # each step trains the model that the run started from (STaR), not the latest

    @property
    def questions(self) -> int:
        return self.question_batch_size

    @property
    def restarts(self) -> bool:
        return self.restart

    def describe_batch(self, n_steps: int) -> str:
        times = f"{self.sft_epochs} time{'s' if self.sft_epochs > 1 else ''}"
        learned = f"the correct ones learned {times} in steps of {self.train_batch_size}"
        return f"{self.questions} questions x {self.group_size} responses, {learned}"

    def too_few(self, there: int) -> str:
        if there >= self.questions:
            return ""
        return (
            f"question_batch_size={self.question_batch_size} asks for more different questions a step than the "
            f"{there} there are: lower it, or give more data"
        )

    def schedule_problems(self, n_steps: int) -> list[str]:
        if not self.restart:
            return super().schedule_problems(n_steps)
        if self.warmup_steps > 1:
            return [
                f"warmup_steps={self.warmup_steps} with restart=true: each step starts its learning rate anew, so it "
                "would never be reached: set warmup_steps=0, or 1 to let the rate rise over the whole of each step"
            ]
        if self.warmup_steps == 1 and self.lr_schedule in ("linear", "cosine"):
            return [
                f"lr_schedule={self.lr_schedule} with warmup_steps=1 and restart=true: the rate rises over the whole "
                "of each step and never falls: set warmup_steps=0, or lr_schedule=constant"
            ]
        return []
