"""Settings: YAML and dotted flags reach frozen dataclasses; whatever a user gets wrong is one clear line."""

from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields, replace

import pytest

from eagle3.config import HeadConfig, HeadOptions, load_config
from eagle3.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    """Inner settings.

    Args:
        rate: a number.
        layers: some layers.
    """

    rate: float = 0.5
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Outer:
    """Outer settings.

    Args:
        name: a name.
        steps: a count.
        fast: a switch.
        files: some files.
        inner: a section.
    """

    name: str = "x"
    steps: int = 3
    fast: bool = False
    files: tuple[str, ...] = ()
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self):
        object.__setattr__(self, "files", tuple(self.files))
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}; it must be 1 or more")


@pytest.fixture
def yaml(tmp_path):
    """yaml(text): path of a file that holds it."""

    def write(text: str, name: str = "a.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


class TestReading:
    def test_defaults(self):
        """Catches: a second place for defaults."""
        assert load_config(Outer, []) == Outer()

    def test_yaml_and_overrides(self, yaml):
        """Catches: flags that lose against the file, sections replaced as a whole by one dotted flag."""
        path = yaml("steps: 7\nfiles: [a, b]\ninner: {rate: 1e-3, layers: [0, 2]}\n")
        loaded = load_config(Outer, ["--config", path, "--inner.rate", "2e-3", "--name=y"])
        assert loaded == Outer("y", 7, False, ("a", "b"), Inner(0.002, (0, 2)))
        assert isinstance(loaded.inner, Inner)

    def test_a_second_file_keeps_what_it_does_not_name(self, yaml):
        """Catches: sections of the first file lost to the second's."""
        first, second = yaml("inner: {rate: 0.1, layers: [1]}"), yaml("inner: {rate: 0.2}", "b.yaml")
        assert load_config(Outer, ["--config", first, "--config", second]).inner == Inner(0.2, (1,))

    def test_frozen(self):
        """Catches: settings changed after they were checked and recorded."""
        with pytest.raises(FrozenInstanceError):
            load_config(Outer, []).steps = 5  # pyright: ignore[reportAttributeAccessIssue]

    def test_help(self, capsys):
        """Catches: a help page that is an error."""
        with pytest.raises(SystemExit) as done:
            load_config(Outer, ["--help"])
        assert done.value.code == 0
        assert "--inner.rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, words",
    [
        ("stepz: 3", r"a\.yaml: unknown setting 'stepz'; did you mean 'steps'\?"),
        ("inner: {rat: 3}", r"unknown setting 'inner\.rat'; did you mean 'inner\.rate'\?"),
        ("iner: {rate: 3}", r"unknown setting 'iner'; did you mean 'inner'\?"),
        ("zzzzzz: 1", r"unknown setting 'zzzzzz'; known: fast, files, inner"),
        ("1: 2", "unknown setting '1'"),
        ("steps: [", "cannot be read as YAML"),
        ("- steps", "holds a list, not a mapping"),
        ("", "holds a NoneType, not a mapping"),
        ("steps: many", 'key "steps": Expected a int. Got value: many'),
        ("steps: 1.5", "Got value: 1.5"),
        ("steps: true", "Got value: True"),
        ("fast: 3", "Expected a bool"),
        ("inner: 3", "inner is 3; it must be a mapping of its settings"),
        ("inner:", "inner is None; it must be a mapping of its settings"),
        ("files: a.jsonl", r"Expected a list such as \[a, b\]"),
        ("inner: {rate: quick}", r'key "inner\.rate": Expected a float'),
        ("steps: 0", "steps is 0; it must be 1 or more"),
        ("steps: 2\nname: y\nsteps: 3", "line 3 sets 'steps' a second time"),
        ("inner: {rate: 0.1, rate: 0.2}", "line 1 sets 'rate' a second time"),
        ("{a: " * 3000, "cannot be read as YAML"),
    ],
)
def test_wrong_yaml_is_one_line(yaml, text, words):
    """Catches: unknown keys that are ignored, values of the wrong type, tracebacks."""
    with pytest.raises(ConfigError, match=words) as error:
        load_config(Outer, ["--config", yaml(text)])
    assert "\n" not in str(error.value)
    assert "<class" not in str(error.value)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--stepz", "3"], r"command line: unknown setting 'stepz'; did you mean 'steps'\?"),
        (["--inner.rat=3"], "did you mean 'inner.rate'"),
        (["--step", "3"], "did you mean 'steps'"),
        (["--steps"], "expected one argument"),
        (["--steps", "0"], "steps is 0"),
        (["--config"], "expected one argument"),
        (["--config", "nowhere.yaml"], "'nowhere.yaml' does not exist"),
        (["--config=nowhere.yaml"], "'nowhere.yaml' does not exist"),
        (["stray"], "unrecognized arguments: stray"),
        (["-s", "3"], "unrecognized arguments: -s"),
    ],
)
def test_wrong_flags_are_one_line(argv, words):
    """Catches: unknown or abbreviated flags, files that are not there."""
    with pytest.raises(ConfigError, match=words) as error:
        load_config(Outer, argv)
    assert "\n" not in str(error.value)


def test_config_paths(tmp_path):
    """Catches: a folder or a binary given as config."""
    with pytest.raises(ConfigError, match="is a folder; give a YAML file"):
        load_config(Outer, ["--config", str(tmp_path)])
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_config(Outer, ["--config", str(tmp_path / "a.yaml")])


HEAD = HeadConfig(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=300,
    draft_vocab_size=100,
    target_hidden_size=64,
    capture_layers=(1, 2),
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    num_layers=1,
    fc_norm=False,
    norm_before_residual=False,
    norm_output=False,
    qk_norm=False,
    attention_bias=False,
    sliding_window=None,
)


class TestHeadConfig:
    def test_derived(self):
        """Catches: an fc as wide as three features whatever is captured; an embedding saved without need."""
        assert HEAD.feature_size == 128
        assert not HEAD.owns_embedding
        assert replace(HEAD, hidden_size=32).owns_embedding
        assert replace(HEAD, capture_layers=[2, 0]).capture_layers == (2, 0)

    @pytest.mark.parametrize(
        "change, words",
        [
            ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
            ({"head_dim": 15}, "head_dim 15 is odd"),
            ({"draft_vocab_size": 301}, "exceeds the vocabulary of 300"),
            ({"capture_layers": ()}, "capture_layers is empty"),
            ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number"),
            ({"hidden_size": "64"}, "hidden_size is '64'"),
            ({"hidden_size": None}, "hidden_size is None"),
            ({"head_dim": 16.0}, r"head_dim is 16\.0"),
            ({"num_layers": True}, "num_layers is True"),
            ({"sliding_window": 0}, "sliding_window is 0"),
            ({"norm_output": "false"}, "norm_output is 'false'; it must be true or false"),
            ({"rope_parameters": [1]}, "rope_parameters is"),
        ],
    )
    def test_impossible_heads(self, change, words):
        """Catches: heads that fail in the middle of a forward, or strings that count as true."""
        with pytest.raises(ConfigError, match=words):
            replace(HEAD, **change)

    @pytest.mark.parametrize("name", [f.name for f in fields(HeadOptions) if f.type in (int, int | None)])
    def test_options_below_one(self, name):
        """Catches: a 0 that silently means the target's size."""
        with pytest.raises(ConfigError, match=f"{name} is 0"):
            replace(HeadOptions(), **{name: 0})

    def test_every_option_has_a_field(self):
        """Catches: an option that the checkpoint cannot store."""
        assert {f.name for f in fields(HeadOptions)} <= {f.name for f in fields(HeadConfig)}

    def test_defaults_stand_in_one_place(self):
        """Catches: an option whose default differs between a fresh head and a loaded one."""
        defaults = {f.name for f in fields(HeadConfig) if f.default is not MISSING}
        assert not defaults & {f.name for f in fields(HeadOptions)}
