"""Which models an endpoint has, where the settings name none."""

from dataclasses import replace
from typing import Any

from rlreason.discovery.exchange import Endpoint, one_line
from rlreason.errors import ConfigError
from rlreason.runtime.text import few

LIMIT_S = 20.0


def only_model(endpoint: Endpoint) -> Endpoint:
    """The endpoint with the one model that it lists; `ConfigError` where it lists none, or several."""
    import httpx

    url = endpoint.url.replace("/chat/completions", "/models")
    headers = {"Authorization": f"Bearer {endpoint.key.strip()}"} if endpoint.key else {}
    at = f"client.base_url={one_line(endpoint.base_url, endpoint.key)}"
    try:
        with httpx.Client(timeout=LIMIT_S, trust_env=not endpoint.on_this_computer) as client:
            answer = client.get(url, headers=headers)
        told: Any = answer.json()
        names = [str(row["id"]) for row in told["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        why = one_line(f"{type(error).__name__}: {error}", endpoint.key)
        raise ConfigError(f"nothing answers at {at} ({why}): start the server, or correct the address") from error
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"client.model=null, and {at} does not list its models: give client.model=NAME") from None
    if len(names) != 1:
        raise ConfigError(
            f"client.model=null, and {at} lists {len(names)} models ({few(names) or 'none'}): give client.model=NAME"
        )
    return replace(endpoint, model=names[0])
