"""``sparge demo``: dense against sparse on this machine, as a table and a page."""
