// A page from the disk may not start a worker, and the theme's search is one. There, an iframe does
// its work. Messages are copied and arrive later, as between workers. On a server nothing is changed.
if (location.protocol === "file:") {
  const later = receive => message => {
    const data = structuredClone(message)
    setTimeout(() => receive(new MessageEvent("message", { data })))
  }
  window.Worker = class {
    constructor(url) {
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inside = frame.contentWindow
      this.waiting = []
      inside.postMessage = later(event => this.onmessage?.(event))
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.load(inside, each)), Promise.resolve())
      const failed = event => this.onerror?.(event)
      this.load(inside, url).then(() => {
        this.deliver = later(event => inside.onmessage(event))
        this.waiting.splice(0).forEach(this.deliver)
      }, failed)
    }
    load(inside, url) {
      return new Promise((done, failed) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src: url, onload: done, onerror: failed })
        inside.document.documentElement.append(script)
      })
    }
    deliver(data) { this.waiting.push(data) }
    postMessage(data) { this.deliver(data) }
    terminate() {}
  }
}
