"""The attempts at what makes a response, the outermost first.

They do not multiply: each layer repeats for a reason that no layer inside it repeats for, and one that gives up ends
the iteration. An attempt has the seed of the one before it, and nothing that was said in it.

Others repeat within one attempt. A reward function is called once more, in a process of its own, if its process had
scored another group before it ended (`rewards.pool`). A reward model on a server is asked three times within the
function's limit (`rewards.ready_made`). Clients of the gateway ask again as they like.
"""

GROUP = 3
"""A group that is not as it was asked for is sampled again, all of its responses."""
CONVERSATION = 8
"""A conversation or rollout that others in its process may have ended begins again; at last in a process of its own."""
SILENT_ROLLOUT = 3
"""A rollout whose agent failed before the policy said a word begins again."""
TURN = 5
"""A response or turn is sampled again at once, on any engine, if its engine was lost or refused it."""
