"""The conformance kit: tests that training under a strategy is the same run.

``pytest --pyargs unipar.testing --strategy NAME`` runs the kit against an installed strategy. This
package imports nothing, since pytest loads the plugin beside it in every environment it is in.
"""

PRELOAD = "_UNIPAR_TESTING_PRELOAD"
"""Names a function, as ``module:function``, that imports what more a suite of tests shares.
No setting of a run, as a name without the underscore would be."""
