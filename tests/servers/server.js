// Arguments: `http` or `http2`, host, port. Answers with "hello" once it has read the request. On SIGTERM it closes
// gracefully: Node itself leaves connections open that are in use, so the last response on each asks to close it.
const [, , protocol, host, port] = process.argv;

let closing = false;
const server = require(protocol).createServer((request, response) => {
  request.resume();
  request.on('end', () => setTimeout(() => {
    if (closing && protocol === 'http') response.setHeader('connection', 'close');
    response.end('hello');
  }, 5));
});

const sessions = new Set();
server.on('session', (session) => {
  sessions.add(session);
  session.on('close', () => sessions.delete(session));
});
server.listen(Number(port), host);
process.on('SIGTERM', () => {
  closing = true;
  server.close();
  sessions.forEach((session) => session.close());
});
