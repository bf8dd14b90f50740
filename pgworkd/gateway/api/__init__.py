"""The gateway: HTTP for producers, workers and operators. Each route is a few lines over a verb.

server    uvicorn, with limits on what it reads        request   what each request goes through
app       asgi: the application, for a server or       routes    jobs bulk batches operate queues schedules fleet
          below another application                              events tokens workers assignments service
                                                       models    what requests and answers look like
"""
