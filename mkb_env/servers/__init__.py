"""Background servers: warm processes that do the work of one job at a time for any number of clients.

Importing torch and two compilers takes about ten seconds, so it is done once per machine, not once per command. A
client (:mod:`mkb_env.servers.client`) starts the server it needs on first use and finds it again later through a Unix
socket in a private folder; a server ends by itself when nobody has asked for anything for a while.

Two kinds serve the same protocol (:mod:`mkb_env.servers.wire`):

* :mod:`mkb_env.servers.forking` forks a child for each job (recording, simulation): a crash, a leak or a hang ends
  with the child;
* :mod:`mkb_env.servers.serial` hands jobs one after another to one long-lived process (a GPU's context).
"""
