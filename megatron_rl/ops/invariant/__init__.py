"""Operations whose result for a row depends on that row alone, to the last bit (`--batch-invariant`).

An operation is batch-invariant if it gives a row the same bits whatever rows are computed beside it, how many these
are, and where among them the row stands. Engines and trainer compute the same tokens in different batches. If both
compute each part of a model by these functions, their log-probs are equal. That is so in three ways:

- element-wise additions, products, quotients and roots are exactly rounded, so sums are made of them, in pairs;
- products of matrices in bf16 are calls of one fixed shape, on rows that are padded to it;
- products in fp32 are calls of MKL in its reproducible mode, which sums each row in one order.

The libraries that torch calls do not promise that rows of a call are treated alike. `bit_equality` checks it at a
run's start, with the shapes of the model.
"""
