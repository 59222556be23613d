"""Tokens, passwords and keys in a recipe: a run uses them, but writes them nowhere."""

import re
from typing import Any

_SECRET = re.compile(
    r"(?:^|_)(?:token|secret|password|passwd|passphrase|credentials?|(?:api|access|auth|private|secret|ssh)_?key)$"
)


def is_secret(name: Any) -> bool:
    """Return True if a key names a secret, such as `hub_token` or `apiKey`; `pad_token_id` does not."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", str(name)).lower()
    return _SECRET.search(words) is not None


def take_secrets(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a mapping, at every depth, into values that may be written to files and secrets."""
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
    """Join again the two mappings that `take_secrets` returns."""
    inner = {key: with_secrets(public[key], secrets[key]) for key in public.keys() & secrets.keys()}
    return public | secrets | inner


def without_secrets(value: Any) -> Any:
    """Return a copy of a value with None in place of each secret."""
    if isinstance(value, dict):
        return {key: None if is_secret(key) else without_secrets(inner) for key, inner in value.items()}
    return [without_secrets(inner) for inner in value] if isinstance(value, list) else value


def hide(text: str, secrets: Any) -> str:
    """Return a text, such as the message of a library's exception, with `…` in place of each secret."""
    if isinstance(secrets, (dict, list)):
        for inner in secrets.values() if isinstance(secrets, dict) else secrets:
            text = hide(text, inner)
        return text
    return text.replace(str(secrets), "…") if secrets not in (None, "", True, False) else text


def _holds_secret(values: list) -> bool:
    inner = [value for value in values if isinstance(value, list)]
    return any(take_secrets(value)[1] for value in values if isinstance(value, dict)) or any(map(_holds_secret, inner))
