"""http://ADDRESS: a remote reward model.

Each group is one POST of `{"prompts", "completions", "completion_ids", "columns"}`. The answer is `{"rewards": [...]}`
or the bare list, with a number or null for each completion.

Failed connections and answers of 500 and above are tried again, three times in all and within the function's limit.
Every other answer is final. If REWARD_HTTP_TOKEN is in the worker's environment, it is sent as a bearer token.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

_TRIES = 3
_FIRST_PAUSE = 0.25
_MOST_BYTES = 1 << 20


def make_http(argument: str | None, timeout: float) -> Callable[..., list[Any]]:
    """Make http://ADDRESS: the rewards that the program at this address answers with."""
    if not argument or not argument.startswith(("http://", "https://")):
        raise ValueError("http needs the address of the reward model: write --reward http://HOST/PATH")
    url = argument

    def http(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[Any]:
        content = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "columns": columns,
        }
        # Ends a little before the pool's limit, so that a late answer is this function's own error.
        return _rewards(url, _ask(url, json.dumps(content).encode(), time.monotonic() + 0.9 * timeout))

    return http


def _ask(url: str, body: bytes, deadline: float) -> bytes:
    headers = {"Content-Type": "application/json"}
    if "REWARD_HTTP_TOKEN" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['REWARD_HTTP_TOKEN']}"
    for attempt in range(_TRIES):
        request = urllib.request.Request(url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=max(deadline - time.monotonic(), 0.01)) as answer:
                return answer.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise RuntimeError(f"{url} answered {error.code} {error.reason}") from None
            reason = f"answered {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = f"did not answer: {error}"
        pause = _FIRST_PAUSE * 2**attempt
        if attempt == _TRIES - 1 or time.monotonic() + pause > deadline:
            break
        time.sleep(pause)
    raise RuntimeError(f"{url} {reason} (tried {attempt + 1} times)")


def _rewards(url: str, answer: bytes) -> list[Any]:
    if len(answer) > _MOST_BYTES:
        raise RuntimeError(f"{url} answered with more than {_MOST_BYTES} bytes")
    try:
        content = json.loads(answer)
    except ValueError:
        raise RuntimeError(f"{url} did not answer with JSON") from None
    rewards = content.get("rewards") if isinstance(content, dict) else content
    if not isinstance(rewards, list):
        raise RuntimeError(f'{url} answered without a list of "rewards"')
    return rewards
