"""The tests have teeth: each known bug of the decoder, put into the code, makes a named test fail."""

from mutants import noticed, of, sound

MUTANTS = of("decode")
test_a_known_bug_is_noticed = noticed(MUTANTS)
test_what_notices_a_bug_passes_without_it = sound(MUTANTS)
