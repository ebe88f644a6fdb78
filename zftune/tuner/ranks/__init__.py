"""Several ranks of one training change knobs after the same step, or none of them does.

After every step each rank says a word, and before the next one is over it has heard everybody's (`exchange`). All hear
the same words in the same order, so each can work out alone what all have agreed on (`accord`):

    after step t      rank 0 proposes knobs
    after step t + 1  everybody has heard of them, and acknowledges or does not
    after step t + 2  everybody has heard of that: the knobs change on every rank, or the change is void

Rank 0 measures and thinks; the others (`follower`) acknowledge, and tell when their loss goes wrong.
"""
