"""Tokens, passwords and keys among a recipe's values: used while a run lasts, and written nowhere."""

import re
from typing import Any

_SECRET = re.compile(
    r"(?:^|_)(?:token|secret|password|passwd|passphrase|credentials?|(?:api|access|auth|private|secret|ssh)_?key)$"
)


def is_secret(name: Any) -> bool:
    """True if a key names a secret, such as `hub_token` or `apiKey`; a `pad_token_id` is none."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", str(name)).lower()
    return _SECRET.search(words) is not None


def take_secrets(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a mapping, at every depth, into what may be written down and its secrets."""
    public, secrets = {}, {}
    for key, value in values.items():
        if is_secret(key) or (isinstance(value, list) and _holds_secret(value)):
            secrets[key] = value
        elif isinstance(value, dict):
            public[key], inner = take_secrets(value)
            secrets |= {key: inner} if inner else {}
        else:
            public[key] = value
    return public, secrets


def with_secrets(public: dict[str, Any], secrets: dict[str, Any]) -> dict[str, Any]:
    """The mapping that `take_secrets` has parted."""
    inner = {key: with_secrets(public[key], secrets[key]) for key in public.keys() & secrets.keys()}
    return public | secrets | inner


def without_secrets(value: Any) -> Any:
    """A value with None in place of each secret in it."""
    if isinstance(value, dict):
        return {key: None if is_secret(key) else without_secrets(inner) for key, inner in value.items()}
    return [without_secrets(inner) for inner in value] if isinstance(value, list) else value


def hide(text: str, secrets: Any) -> str:
    """A text, such as the message of somebody else's exception, without the secrets in it."""
    if isinstance(secrets, (dict, list)):
        for inner in secrets.values() if isinstance(secrets, dict) else secrets:
            text = hide(text, inner)
        return text
    return text.replace(str(secrets), "…") if secrets not in (None, "", True, False) else text


def _holds_secret(values: list) -> bool:
    inner = [value for value in values if isinstance(value, list)]
    return any(take_secrets(value)[1] for value in values if isinstance(value, dict)) or any(map(_holds_secret, inner))
