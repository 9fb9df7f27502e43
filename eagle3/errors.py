"""The errors users meet: each says what was found, what is allowed and what to do."""


class Eagle3Error(Exception):
    """Base of all errors raised on user input; scripts print it on one line and exit with 2."""


class ConfigError(Eagle3Error):
    """A setting is unknown, out of range or contradicts another."""


class UnsupportedTargetError(Eagle3Error):
    """The target's architecture cannot be driven through the attention seam."""


class CheckpointError(Eagle3Error):
    """A head's files are missing, incomplete, mis-shaped or made for another target."""


class VocabMapError(CheckpointError):
    """The draft-to-target vocabulary map is not an injection into the target's vocabulary."""


class DataError(Eagle3Error):
    """A data file cannot be read; the message names file and line."""


class EmptyLossMaskError(DataError):
    """No token is left to train on."""


class StoreError(Eagle3Error):
    """A feature store is damaged, incomplete, full, or made for another run."""


class NotFiniteError(Eagle3Error):
    """The target's hidden states or logits hold NaN or infinity; the message names the document."""


def one_line(error: Exception) -> str:
    """What scripts print on stderr before they exit with 2."""
    return "error: " + " ".join(str(error).split())
