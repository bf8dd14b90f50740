"""The dashboard: pages of the gateway for people, which show and do what the command line does, by the same verbs.

app      Dashboard: what all pages share              callers  who looks: token, one-time address, header of a proxy
route    how a page is answered, and an act           reads    questions of a page, which only read
render   templates, and what a browser may load       forms    forms on pages of their own
names    names in the addresses of pages              pages    one module for each subject
draw     charts, timelines and graphs, as shapes
"""
