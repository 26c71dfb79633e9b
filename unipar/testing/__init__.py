"""The conformance kit: proof, for any strategy, that training under it is the same run."""
