"""The head's settings, and the loader of all configs: frozen dataclasses from YAML with dotted overrides."""

import dataclasses
import difflib
import itertools
import re
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eagle3.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
SCHEMA = 1


@dataclass(frozen=True)
class HeadOptions:
    """What a user chooses about a head; the rest follows from the target. Defaults are the EAGLE-3 code's.

    Args:
        capture_layers: layer i = the output of the target's 0-based decoder layer i; None = EAGLE-3's three.
        draft_vocab_size: tokens the head can propose; None = the target's whole vocabulary.
        num_layers: decoder layers; later ones are plain.
        hidden_size: None = the target's; another width makes the head own a trainable embedding.
        intermediate_size: None = the target's.
        num_attention_heads: None = the target's.
        num_key_value_heads: None = the target's.
        head_dim: None = the target's, or hidden_size / heads where the width differs.
        fc_norm: RMSNorm each captured state before fc (EAGLE-3.1).
        norm_before_residual: the residual is the normed hidden state.
        norm_output: feed the post-norm hidden state to the next step (EAGLE-3.1).
        qk_norm: RMSNorm queries and keys per head.
        attention_bias: biases on q, k, v.
        sliding_window: positions that the head's attention looks back; None = all.
    """

    capture_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = 8192
    num_layers: int = 1
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None

    def __post_init__(self):
        _check_fields(self)
        if self.capture_layers is not None:
            object.__setattr__(self, "capture_layers", tuple(self.capture_layers))


@dataclass(frozen=True)
class HeadConfig:
    """A head in full: what its checkpoint stores and its modules are built from.

    Options are as in HeadOptions, where alone their defaults stand.

    Args:
        vocab_size, target_hidden_size: of the target.
        rope_parameters: in transformers' naming (see RopeSpec).
        max_position_embeddings: the target's.
        trained_length: tokens of the longest training row; None = unknown.
        target_fingerprint: Target.fingerprint of the target it was trained for; None = unknown.
    Raises:
        ConfigError: a size is not positive, a switch no boolean, or sizes that do not fit together.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    capture_layers: tuple[int, ...]
    rope_parameters: dict[str, Any] = field(hash=False)
    max_position_embeddings: int
    rms_norm_eps: float
    num_layers: int
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool
    qk_norm: bool
    attention_bias: bool
    sliding_window: int | None
    trained_length: int | None = None
    target_fingerprint: str | None = None

    def __post_init__(self):
        _check_fields(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads are not a multiple of {self.num_key_value_heads} "
                "key/value heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size {self.draft_vocab_size} exceeds the vocabulary of {self.vocab_size}")
        if not self.capture_layers:
            raise ConfigError("capture_layers is empty: the head needs at least one feature")
        if any(type(layer) is not int for layer in self.capture_layers):
            raise ConfigError(f"capture_layers is {self.capture_layers!r}; it must be a list of layer numbers")
        if not isinstance(self.rope_parameters, dict):
            raise ConfigError(f"rope_parameters is {self.rope_parameters!r}; it must be a mapping")
        object.__setattr__(self, "capture_layers", tuple(self.capture_layers))

    @property
    def feature_size(self) -> int:
        return len(self.capture_layers) * self.target_hidden_size

    @property
    def owns_embedding(self) -> bool:
        return self.hidden_size != self.target_hidden_size


def _check_fields(config: Any) -> None:
    """Sizes are whole numbers from 1, switches are booleans: values may come from another tool's JSON."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value, kinds = getattr(config, name), set(typing.get_args(hint) or (hint,))
        if value is None and type(None) in kinds:
            continue
        if int in kinds and Ellipsis not in kinds and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        unfit = isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf")
        if float in kinds and unfit:
            raise ConfigError(f"{name} is {value!r}; it must be a number above 0")
        if bool in kinds and type(value) is not bool:
            raise ConfigError(f"{name} is {value!r}; it must be true or false")


def load_config(cls: type[T], argv: Sequence[str] | None = None, description: str | None = None) -> T:
    """Read `cls` from `--config FILE.yaml` and dotted overrides (`--optim.lr 1e-3`), later ones winning.

    Raises:
        ConfigError: no such file, unknown key (the nearest known one is named), value of the wrong type.
    """
    import jsonargparse

    argv = list(sys.argv[1:] if argv is None else argv)
    known = field_names(cls)
    for path in _config_paths(argv):
        _check_tree(read_yaml(path), known, str(path))
    _check_flags(argv, known)
    parser = jsonargparse.ArgumentParser(
        description=description,
        usage="%(prog)s [--config FILE.yaml] [--setting value] [--group.setting value] ...",
        formatter_class=_help_formatter(),
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file; flags after it override its keys")
    parser.add_class_arguments(cls, as_group=False)
    try:
        values = parser.instantiate(parser.parse_args(argv))
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise ConfigError(_plain(str(error))) from error
    return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)})


def _help_formatter() -> type:
    import argparse

    import jsonargparse

    class LinesAsTheyAre(argparse.RawDescriptionHelpFormatter, jsonargparse.DefaultHelpFormatter):
        """Commands in the description keep their lines."""

    return LinesAsTheyAre


def field_names(cls: type, prefix: str = "") -> set[str]:
    """Dotted names of all settings of a dataclass and of the dataclasses inside it."""
    names: set[str] = set()
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        names.add(prefix + f.name)
        if dataclasses.is_dataclass(hints[f.name]):
            names |= field_names(hints[f.name], f"{prefix}{f.name}.")
    return names


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping from a file.

    Raises:
        ConfigError: the path is no file, or holds no mapping.
    """
    import yaml

    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ConfigError(f"config {str(path)!r} {what}; give a YAML file such as recipes/base/smollm2-135m.yaml")
    try:
        content = yaml.load(Path(path).read_text(), _unique_keys(yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ConfigError(f"config {str(path)!r} cannot be read as YAML: {_plain(str(error))}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config {str(path)!r} holds a {type(content).__name__}, not a mapping of settings")
    return content


def _unique_keys(loader: Any) -> Any:
    """The YAML loader, refusing a key that stands twice in one mapping: the first one would be ignored."""

    class Unique(loader):
        def construct_mapping(self, node, deep=False):
            seen: set[str] = set()
            for key, _ in node.value:
                if str(key.value) in seen:
                    raise ConfigError(f"line {key.start_mark.line + 1} sets {key.value!r} a second time")
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    return Unique


def unknown_key(name: str, known: set[str], where: str) -> ConfigError:
    """The error for a key that nobody reads, naming the nearest known one."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return ConfigError(f"{where}: unknown setting {name!r}; {hint}")


def _check_tree(tree: dict[str, Any], known: set[str], where: str, prefix: str = "") -> None:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name not in known:
            raise unknown_key(name, known, where)
        if any(k.startswith(f"{name}.") for k in known):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {name} is {value!r}; it must be a mapping of its settings")
            _check_tree(value, known, where, f"{name}.")


def _check_flags(argv: Sequence[str], known: set[str]) -> None:
    for token in argv:
        name = token[2:].split("=")[0].removesuffix("+")
        if token.startswith("--") and name not in known | {"help", "config", "print_config"}:
            raise unknown_key(name, known, "command line")


def _plain(message: str) -> str:
    """A library's message on one line, without Python's notation of types."""
    message = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", " ".join(message.split()))
    return message.replace("Expected a tuple", "Expected a list such as [a, b]")


def _config_paths(argv: Sequence[str]) -> list[str]:
    paths = [after for flag, after in itertools.pairwise(argv) if flag == "--config"]
    return paths + [token.split("=", 1)[1] for token in argv if token.startswith("--config=")]
