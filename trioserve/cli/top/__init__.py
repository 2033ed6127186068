"""``trioserve top``: the live feed of a server, in a terminal.

========  =======================================================================
module    what is in it
========  =======================================================================
options   what the command can be told
feed      the server's pictures, one after the other
view      what is shown of them: the newest, what came before, the person's wishes
drawing   the view as lines of a given width and height
table     the requests among them, and the tree of tasks
glyphs    bars, sparklines and numbers
keys      what the bytes that a keyboard sends mean
screen    the terminal while it is ours
command   the whole
========  =======================================================================
"""
