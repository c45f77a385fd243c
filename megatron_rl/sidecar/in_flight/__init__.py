"""The number of responses that engines are given at once, chosen so that groups finish spread over an iteration."""
