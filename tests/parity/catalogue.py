"""Everything that is compared, and why the rest is not."""

from tests.parity.cases import advantages, correction, policy, preference, tokens

CASES_BY_TOPIC = {
    "policy": policy.CASES,
    "tokens": tokens.CASES,
    "advantages": advantages.CASES,
    "correction": correction.CASES,
    "preference": preference.CASES,
}
CASES = [case for cases in CASES_BY_TOPIC.values() for case in cases]

ALONE = {
    "running_baseline": "prime-rl has it (RAE), ROLL in another order; neither is installed here",
    "turn_credit": "AReaL discounts turns in the middle of an asynchronous workflow, the others not at all",
    "length_penalty": "Attune's own",
    "LOG_RATIO_BOUND": "a constant: the cases beyond ±20 show what it does",
}
