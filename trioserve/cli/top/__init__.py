"""``trioserve top``: the live feed of a server, in a terminal.

========  =======================================================================
module    contents
========  =======================================================================
options   the command's options
feed      the server's snapshots, one after the other
view      the state of the screen: the newest snapshot, the history, the keys pressed
drawing   the view as lines of a given width and height
workers   the lines about several workers
table     the lower part of them: requests as a table, or tasks as a tree
glyphs    bars, sparklines and numbers
keys      names of keys from the bytes of a keyboard
screen    the terminal while the command fills it
command   the tasks that connect these
========  =======================================================================
"""
