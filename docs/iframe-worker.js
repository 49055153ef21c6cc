// A page from the disk may not start a worker, and the theme's search is one. There, an iframe does
// its work: messages are handed over as events. On a server nothing is changed.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inside = frame.contentWindow
      this.waiting = []
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.load(inside, each)), Promise.resolve())
      this.load(inside, url).then(() => {
        this.deliver = data => inside.dispatchEvent(new MessageEvent("message", { data }))
        this.waiting.splice(0).forEach(this.deliver)
      })
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
