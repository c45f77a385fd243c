"""An agent: it has the model pay an amount exactly, in a chat of three payments at most, with a fee after the first."""

import openai
from openai.types.chat import ChatCompletionMessageParam

MOST_PAYMENTS = 3
# One for all rollouts: to make a client takes longer than to use it.
CLIENT = openai.OpenAI(base_url="http://localhost", api_key="each rollout has its own")


def pay(base_url: str, api_key: str, model: str, amount: int, fee: int, **row) -> float:
    """Chat until all is paid, or an answer is not a payment; return 1 if all is paid."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[ChatCompletionMessageParam] = []
    left = amount
    for _ in range(MOST_PAYMENTS):
        messages.append({"role": "user", "content": f"{left:02}="})
        answer = client.chat.completions.create(model=model, messages=messages)
        payment = answer.choices[0].message.content or ""
        if len(payment) != 1 or not payment.isdecimal() or int(payment) > left:
            return 0.0
        messages.append({"role": "assistant", "content": payment})
        left += fee - int(payment)
        fee = 0
        if not left:
            return 1.0
    return 0.0
